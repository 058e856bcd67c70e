"""The sandbox, against programs that want out: what R43, R44, R46, R47 and B139 list, each a run of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from burnish.agentic.sandbox import Ran, Sandbox, SandboxError, SandboxLimits, SandboxUnavailable
from burnish.config.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
MIB = 2**20


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SandboxLimits(seconds=15.0))


def run(sandbox: Sandbox, program: str, *, limits: SandboxLimits | None = None, stdin: str = "") -> Ran:
    return sandbox.run(["python", "-c", textwrap.dedent(program)], limits=limits, stdin=stdin)


def said(sandbox: Sandbox, program: str) -> str:
    ran = run(sandbox, program)
    assert ran.ok, ran
    return ran.stdout.decode().strip()


def attempts(*programs: str) -> str:
    """A program that tries each, and prints what came of it."""
    head = "import os, socket, ctypes, signal, subprocess, sys\n"
    tries = (f"try:\n    print('did', {program})\nexcept BaseException as e:\n    print('no', type(e).__name__)\n" for program in programs)
    return head + "".join(tries)


# ------------------------------------------------------------------------------------------------------------------- R43: seeing out


@pytest.fixture
def listener() -> Iterator[tuple[int, list[int]]]:
    """A port on the loopback interface, and who has called."""
    calls: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        stop = threading.Event()

        def serve() -> None:
            while not stop.is_set():
                try:
                    server.accept()[0].close()
                    calls.append(1)
                except TimeoutError:
                    continue

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1], calls
        stop.set()
        thread.join()


def test_r43_no_listener_hears_anything(sandbox: Sandbox, listener: tuple[int, list[int]]) -> None:
    port, calls = listener
    tries = [f"socket.create_connection(({host!r}, {port}), 0.5)" for host in ("127.0.0.1", "localhost", "0.0.0.0")]
    got = said(sandbox, attempts(*tries, "socket.getaddrinfo('example.org', 80)", "len(socket.if_nameindex())"))
    assert got.splitlines()[:4] == ["no OSError", *got.splitlines()[1:2], "no OSError", "no gaierror"] and got.endswith("did 1")
    socket.create_connection(("127.0.0.1", port)).close()
    time.sleep(0.2)
    assert calls == [1], "this test's own call only"


def test_r43_canaries_are_not_read_and_nothing_is_written_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    canary, home = tmp_path / "canary", Path.home() / f".burnish-canary-{os.getpid()}"
    canary.write_text("secret")
    home.write_text("secret")
    try:
        reads = [f"open({str(path)!r}).read()" for path in (canary, home)]
        more = ["open('/proc/1/environ').read()", "os.listdir('/home')", "os.listdir('/sys')", "open('/etc/shadow').read()"]
        writes = [f"open({path!r}, 'w').write('x')" for path in (str(tmp_path / "new"), "/usr/x", "/etc/x", "/x", "/dev/x", "/lib/x")]
        got = said(sandbox, attempts(*reads, *more, *writes))
    finally:
        home.unlink()
    assert "did" not in got and "secret" not in got and len(got.splitlines()) == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["canary"]


def test_r43_the_environment_is_empty(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CANARY", "secret")
    assert run(sandbox, "").ok
    assert sandbox.run(["/usr/bin/env"]).stdout == b""
    assert sandbox.run(["/usr/bin/env"], environment={"A": "b"}).stdout == b"A=b\n"


def test_no_privileges_and_none_to_be_had(sandbox: Sandbox) -> None:
    """B139: nor through ctypes, nor by a user namespace of one's own, nor by what is set-uid."""
    libc = "ctypes.CDLL(None, use_errno=True)"
    calls = ["unshare(0x10000000)", "unshare(0x00020000)", "mount(b'none', b'/tmp', b'tmpfs', 0, None)", "chroot(b'/tmp')", "setuid(0)"]
    got = said(sandbox, attempts(*(f"{libc}.{call}" for call in calls), "os.getuid()", "os.setgroups([0])"))
    assert got.splitlines() == ["did -1"] * 5 + ["did 1000", "no PermissionError"]


# ---------------------------------------------------------------------------------------------------- R44: using up, and staying behind


def test_r44_a_fork_bomb_meets_the_limit_and_leaves_nobody(sandbox: Sandbox) -> None:
    marker = f"bomb-{os.getpid()}-{time.monotonic_ns()}"
    counted = f"""
        import os, time
        marker, made = {marker!r}, 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(60)
                made += 1
        except OSError:
            print(made, flush=True)
        time.sleep(60)
    """
    ran = run(sandbox, counted, limits=SandboxLimits(seconds=2.5, num_processes=20))
    assert ran.ended == "timeout" and 10 <= int(ran.stdout) < 20 and ran.seconds < 15
    bomb = f"import os\nmarker = {marker!r}\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert run(sandbox, bomb, limits=SandboxLimits(seconds=0.5)).ended == "timeout"
    assert alive(marker) == []
    assert said(sandbox, "print(1)") == "1", "the next run is an honest one"


@pytest.mark.parametrize("how", ["bytearray(2 * 2**30)", "[bytearray(100 * 2**20) for _ in range(20)]"])
def test_r44_two_gib_of_memory_are_refused(sandbox: Sandbox, how: str) -> None:
    ran = run(sandbox, f"x = {how}\nprint(len(x))")
    assert ran.code == 1 and b"MemoryError" in ran.stderr


def test_r44_memory_of_many_processes_is_added_up(sandbox: Sandbox) -> None:
    program = """
        import os, time
        for _ in range(8):
            if os.fork() == 0:
                held = b"x" * (40 * 2**20)
                time.sleep(60)
        time.sleep(60)
    """
    ran = run(sandbox, program, limits=SandboxLimits(seconds=20.0, memory_bytes=160 * MIB))
    assert (ran.ended, ran.code) == ("memory", None) and ran.seconds < 15


def test_r44_a_gib_of_files_is_refused(sandbox: Sandbox) -> None:
    one = run(sandbox, "open('big', 'wb').write(b'x' * 2**27 )\nprint('written')")
    assert not one.ok and b"written" not in one.stdout, "one file"
    many = """
        n = 0
        try:
            while n < 1024:
                open(f'/tmp/{n}', 'wb').write(b'x' * 2**20)
                n += 1
        except OSError as error:
            print(n, error.strerror)
    """
    count, _, why = said(sandbox, many).partition(" ")
    assert int(count) in (63, 64) and why == "No space left on device", "many of a MiB, where 64 MiB are given to all"
    empty = "n = 0\ntry:\n    while True:\n        open(f'{n}', 'w'); n += 1\nexcept OSError as e: print(n < 4096, e.strerror)"
    assert said(sandbox, empty) == "True No space left on device", "without content"


def test_r44_a_gb_of_output_is_cut(sandbox: Sandbox) -> None:
    for stream in ("stdout", "stderr"):
        ran = run(sandbox, f"import sys\nfor _ in range(1000): sys.{stream}.write('x' * 10**6)")
        assert ran.ended == "output" and ran.code is None and len(getattr(ran, stream)) == 64 * 1024
    assert ran.told().endswith("x\n[stopped: it printed too much]")


def test_r44_a_sleeper_in_a_session_of_its_own_ends_with_the_run(sandbox: Sandbox) -> None:
    marker = f"sleeper-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
        import subprocess, sys
        sleeper = "import os, time; os.setsid() if os.getpid() != os.getsid(0) else 0; time.sleep(600)"
        nothing = subprocess.DEVNULL
        for _ in range(5):
            subprocess.Popen([sys.executable, "-c", sleeper, {marker!r}], start_new_session=True, stdout=nothing, stderr=nothing)
        print("left")
    """
    ran = run(sandbox, program)
    assert ran.ok and ran.stdout == b"left\n" and ran.seconds < 15
    assert alive(marker) == []


def test_r44_the_parent_cant_be_killed_or_traced(sandbox: Sandbox) -> None:
    trace = "ctypes.CDLL(None, use_errno=True).ptrace(16, {}, 0, 0)"  # PTRACE_ATTACH
    got = said(sandbox, attempts("os.getppid()", "os.kill(1, 9)", "os.kill(os.getppid(), 9)", trace.format(1), "os.getppid()"))
    assert got.splitlines() == ["did 1", "did None", "did None", "did -1", "did 1"]
    outside = said(sandbox, attempts(f"os.kill({os.getpid()}, 0)", f"os.kill({os.getppid()}, 9)"))
    assert outside.splitlines() == ["no ProcessLookupError"] * 2


def test_time_and_cpu_have_limits(sandbox: Sandbox) -> None:
    asleep = run(sandbox, "print('begun', flush=True)\nimport time; time.sleep(600)", limits=SandboxLimits(seconds=1.5))
    assert (asleep.ended, asleep.stdout) == ("timeout", b"begun\n") and asleep.seconds < 15
    stubborn = "import signal\nfor s in (15, 2, 1): signal.signal(s, signal.SIG_IGN)\nwhile True: pass"
    assert run(sandbox, stubborn, limits=SandboxLimits(seconds=0.5)).ended == "timeout"
    assert run(sandbox, "while True: pass", limits=SandboxLimits(seconds=20, cpu_seconds=1)).ended == "timeout"


def alive(marker: str) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "stat,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in listed if marker in line and "pytest" not in line]


# ------------------------------------------------------------------------------------------------------------- R46: one after the other


def test_r46_nothing_is_carried_from_one_run_to_the_next(sandbox: Sandbox) -> None:
    poison = """
        import os, sys
        for path in ('sitecustomize.py', '/tmp/usercustomize.py', 'json.py', '/tmp/left'):
            open(path, 'w').write('raise SystemExit(3)')
        os.chmod('.', 0)
    """
    assert run(sandbox, poison).ok
    assert said(sandbox, "import json, os; print(os.listdir('/tmp'), os.listdir('/work'), json.dumps(1))") == "[] [] 1"


def test_files_and_input_come_in_and_output_comes_out(sandbox: Sandbox) -> None:
    ran = sandbox.run(
        ["python", "main.py", "a b"],
        files={"main.py": "import sys, helpers.x\nprint(sys.argv[1], sys.stdin.read(), helpers.x.Y)", "helpers/x.py": b"Y = '\xc3\xa9'"},
        stdin="in",
    )
    assert ran.stdout.decode() == "" and b"No module named 'helpers'" in ran.stderr, "isolated: the folder isn't on the path"
    ran = sandbox.run(["/bin/sh", "-c", "cat helpers/x.py; exit 7"], files={"helpers/x.py": "Y = 1"})
    assert (ran.code, ran.stdout, ran.told()) == (7, b"Y = 1", "Y = 1\n[exit code 7]")
    assert run(sandbox, "import os; os.abort()").ended == "signal"


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", "", "a\0b", "x" * 2000])
def test_files_have_names_inside(sandbox: Sandbox, name: str) -> None:
    with pytest.raises(UserError, match="relative path"):
        sandbox.run(["python"], files={name: "x"})


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True])
def test_b087_limits_are_finite(value: float) -> None:
    with pytest.raises(UserError, match="seconds of a sandbox must be finite"):
        SandboxLimits(seconds=value)


def test_what_cant_be_started_is_no_result(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="/nowhere can't be started: .*No such file"):
        sandbox.run(["/nowhere"])


# ---------------------------------------------------------------------------------------------------------------- R47: no isolation


def test_r47_without_user_namespaces_there_is_no_sandbox() -> None:
    program = "from burnish.agentic.sandbox import Sandbox\nSandbox()"
    off = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    ended = subprocess.run(["unshare", "-Ur", "sh", "-c", off, sys.executable, program], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and "SandboxUnavailable: the sandbox can't isolate here" in ended.stderr
    assert "user.max_user_namespaces" in ended.stderr and "nothing is run without them" in ended.stderr


def test_r47_elsewhere_than_on_linux_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="needs Linux's namespaces, and this is darwin"):
        Sandbox()


def test_an_ordinary_user_has_one_too(tmp_path: Path) -> None:
    """In a user namespace in which there is only one user, as in a container without root."""
    program = "from burnish.agentic.sandbox import Sandbox\nprint(Sandbox().run(['/usr/bin/id', '-u']))"
    ended = subprocess.run(["unshare", "-Uc", sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "stdout=b'1000\\n'" in ended.stdout, ended.stderr
