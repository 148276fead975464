"""CPU seconds of `precisionctl --help`, median of seven: what every use of the program costs."""

import resource
import statistics
import subprocess
import sys


def cpu_seconds() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "precisionctl", "--help"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    print(f"--help: {statistics.median(cpu_seconds() for _ in range(7)):.3f} s of CPU (the aim is under 0.3 s)")
