"""Make the tree DST equal to SRC and remove SRC, without touching files of DST that are already equal."""
import filecmp
import os
import shutil
import sys


def files(root: str) -> set[str]:
    return {os.path.relpath(os.path.join(d, f), root) for d, _, names in os.walk(root) for f in names}


def main(src: str, dst: str) -> None:
    os.makedirs(dst, exist_ok=True)
    new, old = files(src), files(dst)
    for name in old - new:
        os.remove(os.path.join(dst, name))
    for name in new:
        a, b = os.path.join(src, name), os.path.join(dst, name)
        if name in old and filecmp.cmp(a, b, shallow=False):
            continue
        os.makedirs(os.path.dirname(b), exist_ok=True)
        shutil.copyfile(a, b)
        shutil.copymode(a, b)
    shutil.rmtree(src)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
