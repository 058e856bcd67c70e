"""The critic of a run: which model it is, its optimizer and its state, and what can be asked of it.

Owns the choice of its weights and the check that it can read the policy's ids. The programs are `train.value`, the loss and the returns the
algorithm's. The cluster holds the one critic, says where it runs and saves it; a learner asks through the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from jax.sharding import Mesh

from burnish.config.algorithms import CriticConfig
from burnish.config.schema import TrainingConfig
from burnish.models import scalar_head, weights
from burnish.models.config import ModelConfig
from burnish.models.locate import locate
from burnish.models.model import Model
from burnish.models.sharding import check_mesh
from burnish.models.transformer import Params, Precision
from burnish.observe.devices import dispatched
from burnish.observe.metrics import Metric
from burnish.observe.trace import span
from burnish.rl.aggregate import Aggregate
from burnish.rl.batch import TokenBatch
from burnish.rl.losses import ValueLoss
from burnish.rl.sites import Site
from burnish.rl.vocabulary import check_reads_ids
from burnish.sync.host_memory import to_devices, to_host
from burnish.text.codec import Codec
from burnish.train.optim import make_optimizer
from burnish.train.state import TrainState, init_state, stop_if_nonfinite
from burnish.train.step import Steps
from burnish.train.value import ValueMicroBatch, Values, make_value_steps, make_values, read_value_metrics

OPTIMIZER = "algorithm.critic.optimizer"
"""Where the critic's optimizer stands in a configuration."""


class Critic:
    """A decoder with a scalar head, of which every weight is trained in float32.

    config.path: a sequence classifier brings its score, a language model starts with a score of 0, as the actor's own first weights do
    where there is no path. Those weights are read in `prepare`; what can be wrong with the folder is an error before. offload: weights and
    optimizer wait in the host's memory between uses.
    """

    def __init__(
        self,
        config: CriticConfig,
        actor: Model,
        *,
        context: int,
        precision: Precision,
        site: Site,
        offload: bool = False,
    ) -> None:
        self.config, self._site, self._offload = config, site, offload
        self._precision: Precision = precision
        found = check_critic(config, actor.codec, context=context, mesh=site.mesh)
        self._folder, self.architecture = (None, actor.config) if found is None else found
        self._values = site.in_turn(make_values(self.architecture, precision=precision))
        self._state: TrainState | None = None
        self._steps: Steps[ValueMicroBatch] | None = None

    def prepare(self, actor: Params, value_loss: ValueLoss, aggregate: Aggregate, *, training: TrainingConfig, total_updates: int) -> None:
        """Read the weights, start the optimizer, take the loss. actor: the actor's first weights, which aren't changed."""
        optimizer = make_optimizer(self.config.optimizer, total_updates=total_updates, key=OPTIMIZER)
        if self._folder is None:
            decoder = {name: leaf for name, leaf in actor.items() if name != "head"}
            first = self._site.spread(decoder, scalar_head.spec(self.architecture)["decoder"])
            params = scalar_head.with_zero_score(self.architecture, first, mesh=self._site.mesh)
        else:
            _, params = weights.load_scalar(self._folder, mesh=self._site.mesh, zero_head=True)
        self.replace_state(init_state(params, optimizer))
        remat = True if training.remat == "auto" else training.remat
        steps = make_value_steps(self.architecture, value_loss, aggregate, optimizer, precision=self._precision, remat=remat)
        self._steps = steps.mapped(self._site.in_turn)
        self._limit = training.max_nonfinite_updates

    @property
    def is_trained(self) -> bool:
        return self._state is not None

    @property
    def state(self) -> TrainState:
        """Its weights and optimizer, on the devices, or where they wait."""
        if self._state is None:
            raise RuntimeError("the critic has no loss yet: a learner calls prepare() with an algorithm that has one")
        return self._state

    def replace_state(self, state: TrainState | None) -> None:
        """Go on from another state; None lets go of the one there is."""
        self._state = to_host(state) if self._offload and state is not None else state

    def _working(self) -> TrainState:
        return to_devices(self.state) if self._offload else self.state

    def values(self, batch: TokenBatch) -> tuple[Values, Values]:
        """Before and after each scored id, 0 at padding, under the critic's weights now."""
        with span("score", role="critic"):
            start = time.monotonic_ns()
            values = self._site.back(self._values(self._working().trainable, self._site.take(batch)))
            dispatched("critic", "score", values, start_ns=start)
        return values

    def update(self, micro_batches: Iterable[ValueMicroBatch], *, count: int, step: int) -> dict[str, Metric]:
        """One update from a mini-batch of `count` micro-batches. Returns its metrics, `critic/…`; raises NonFiniteError as the actor's."""
        state = self._working()
        assert self._steps is not None, "made together with the state"
        start = time.monotonic_ns()
        state, report = self._steps.update(state, None, map(self._site.take, micro_batches), count=count)
        dispatched("critic", "update", report, start_ns=start, step=step - 1)
        self.replace_state(state)
        with span("update.wait", role="critic"):
            metrics = read_value_metrics(report)
        stop_if_nonfinite(state, report, limit=self._limit, step=step, optimizer=OPTIMIZER)
        return metrics


def check_critic(config: CriticConfig, codec: Codec, *, context: int, mesh: Mesh | None) -> tuple[Path, ModelConfig] | None:
    """The folder and architecture of a critic that can read what the actor writes (`codec`, at most `context` ids); reads no weights.

    None where there is no path: then it is the actor's own.
    """
    if config.path is None:
        return None
    folder = locate(config.path)
    architecture = weights.load_scalar_config(folder, zero_head=True)
    if mesh is not None:
        check_mesh(architecture, mesh)
    check_reads_ids("algorithm.critic.path", "critic", folder, architecture, codec, context=context)
    return folder, architecture
