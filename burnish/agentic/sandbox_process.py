"""The inside of the sandbox: a program of its own that shuts itself in, starts what it was given and says how that ended.

Run by `sandbox.py` as a file, with the standard library only. Owns namespaces, mounts, ids and resource limits. Three processes: the
*launcher* (this program) unshares and waits; the *init*, process 1 of the new namespace, holds the files and reaps; the *candidate* is what
was asked for. When init ends the kernel kills whatever else is in there. Any step that fails ends in an error report, never in running
the candidate with less around it.

The job comes on standard input: a line of JSON, then the files' bytes one after the other. Reports go to the descriptor named on the
command line, a line of JSON each: {"started": true}, then {"exit": code} (below 0: a signal), or {"error": text}. The candidate doesn't
hold that descriptor.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWCGROUP = (
    0x00020000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000, 0x02000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE, MS_BIND = 0x2, 0x4, 0x4000, 0x40000, 0x1000
MNT_DETACH, AT_RECURSIVE, AT_FDCWD = 2, 0x8000, -100
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4
MOUNT_SETATTR = 442
"""The same number on every architecture."""
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
INNER_ID = 1000
DEVICES = ("null", "zero", "full", "random", "urandom")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")

libc = ctypes.CDLL(None, use_errno=True)


def check(result, what):
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags, what):
    check(libc.unshare(flags), f"unshare({what})")


def mount(source, target, kind=None, flags=0, options=None):
    texts = [None if text is None else str(text).encode() for text in (source, target, kind, options)]
    check(libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount({target})")


class MountAttr(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "userns")]


def read_only(target):
    attr = MountAttr(ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0)
    arguments = (MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, ctypes.byref(attr), ctypes.sizeof(attr))
    check(libc.syscall(*arguments), f"mount_setattr({target})")


def bind(held, target):
    """Show what the descriptor means at `target`, read-only."""
    mount(f"/proc/self/fd/{held}", target, flags=MS_BIND | MS_REC)
    read_only(target)


def build_root(job, owner):
    """A root of its own on a small tmpfs: the system read-only, a few devices, /work and /tmp to write in. No /proc, no /sys, no home."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    shown = [path for path in (*SYSTEM, *job["read_only"]) if os.path.exists(path) and not os.path.islink(path)]
    links = {path: os.readlink(path) for path in SYSTEM if os.path.islink(path)}
    held = {path: os.open(path, os.O_PATH) for path in (*shown, *(f"/dev/{name}" for name in DEVICES))}
    root = "/tmp"
    mount("none", root, "tmpfs", MS_NOSUID | MS_NODEV, f"size={job['disk_bytes']},nr_inodes={job['num_files']},mode=755")
    for path, descriptor in held.items():
        target = root + path
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        bind(descriptor, target)
        os.close(descriptor)
    for path, target in links.items():
        os.symlink(target, root + path)
    for path in ("work", "tmp", "old"):
        os.mkdir(f"{root}/{path}", 0o700)
        os.chown(f"{root}/{path}", *owner)
    machine = os.uname().machine
    if machine not in PIVOT_ROOT:
        raise OSError(f"pivot_root isn't known for {machine}")
    check(libc.syscall(PIVOT_ROOT[machine], root.encode(), f"{root}/old".encode()), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount(/old)")
    os.rmdir("/old")


def write(proc, name, text):
    descriptor = os.open(name, os.O_WRONLY, dir_fd=proc)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def map_ids(proc, uid, gid):
    """One user and one group in the new user namespace, and no further such namespaces inside."""
    write(proc, "self/setgroups", "deny")
    write(proc, "self/uid_map", f"{INNER_ID} {uid} 1")
    write(proc, "self/gid_map", f"{INNER_ID} {gid} 1")
    write(proc, "sys/user/max_user_namespaces", "0")


def shut_in(job):
    """Leave every namespace. As root another, unused user is taken first; else the user namespace alone separates."""
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY)
    rest, names = NEWPID | NEWNET | NEWIPC | NEWUTS | NEWCGROUP, "pid, net, ipc, uts, cgroup"
    uid = job["unused_id"]
    if uid is not None:
        unshare(NEWNS, "mount")
        build_root(job, (uid, uid))
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        check(libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "prctl")  # else /proc/self is root's
        unshare(NEWUSER | rest, f"user, {names}")
        map_ids(proc, uid, uid)
    else:
        uid, gid = os.geteuid(), os.getegid()
        unshare(NEWUSER | NEWNS, "user, mount")
        map_ids(proc, uid, gid)
        build_root(job, (INNER_ID, INNER_ID))
        unshare(rest, names)
    os.close(proc)


def limit(job):
    """Limits of the candidate; they hold for each process, the number of processes for all together."""
    for name, value in job["rlimits"].items():
        kind = getattr(resource, name)
        resource.setrlimit(kind, (value, value + (name == "RLIMIT_CPU")))  # a signal that tells it apart comes before the kill


def read_job():
    """What to do, and the files with their bytes."""
    head = json.loads(sys.stdin.buffer.readline())
    files = [(path, mode, sys.stdin.buffer.read(size)) for path, mode, size in head["files"]]
    return head, files, sys.stdin.buffer.read(head["stdin"])


def put_files(files):
    for path, mode, content in files:
        target = os.path.join("/work", path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "wb") as file:
            file.write(content)
        os.chmod(target, mode)


def be_init(job, files, stdin, say, lifeline):
    """Process 1 in there. It can't be killed or traced from inside."""
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")
    if select.select([lifeline], [], [], 0)[0]:  # the launcher has died before it could take this along
        os._exit(1)
    os.umask(0o022)
    put_files(files)
    os.chdir("/work")
    held = os.memfd_create("stdin")
    os.write(held, stdin)
    os.lseek(held, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.dup2(held, 0)
            for descriptor in range(3, 256):
                if descriptor != say:
                    try:
                        os.close(descriptor)
                    except OSError:
                        pass
            limit(job)
            os.execve(job["command"][0], job["command"], job["environment"])  # `say` closes itself
        except BaseException as error:
            report(say, error=f"{job['command'][0]} can't be started: {error}")
            os._exit(127)
    os.dup2(held, 1)  # its output belongs to the candidate alone
    os.dup2(held, 2)
    report(say, started=True)
    while True:
        ended, status = os.wait()
        if ended == child:
            report(say, exit=os.waitstatus_to_exitcode(status))
            os._exit(0)


def report(say, **what):
    os.write(say, (json.dumps(what) + "\n").encode())


def main(say):
    os.set_inheritable(say, False)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        job, files, stdin = read_job()
        shut_in(job)
        lifeline, held_open = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.close(held_open)
                be_init(job, files, stdin, say, lifeline)
            except BaseException as error:
                report(say, error=f"{type(error).__name__}: {error}")
            os._exit(1)
        os.close(lifeline)
        os.closerange(0, 3)
        os.waitpid(child, 0)
    except BaseException as error:
        report(say, error=f"{type(error).__name__}: {error}")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
