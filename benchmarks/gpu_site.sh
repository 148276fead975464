# To be sourced in the project's root on a GPU machine without a network: what was carried in .gpu/ becomes importable.
# .gpu/*.tar.xz are archives of a folder `site`, .gpu/*.whl wheels that need no building. Python unpacks both: there may
# be no xz and no unzip.

carried=$(mktemp -d)
mkdir -p "$carried/site"
for archive in .gpu/*.tar.xz; do
    if [ -e "$archive" ]; then python3 -m tarfile --filter data -e "$archive" "$carried"; fi
done
for wheel in .gpu/*.whl; do
    if [ -e "$wheel" ]; then python3 -m zipfile -e "$wheel" "$carried/site"; fi
done
# Once, and not by each of the processes that start at once; and what Python says of torchao's own strings when it compiles
# them would be an error in a test.
python3 -W ignore -m compileall -q -j 0 "$carried/site"
export PYTHONPATH="$carried/site:$PWD"
# Else Transformer Engine takes a cuDNN of the system, if there is one, beside PyTorch's
export CUDNN_HOME="$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia/cudnn"
