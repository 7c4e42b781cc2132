#!/usr/bin/env bash
# Upload what `python -m recipes.publish --work FOLDER` has made, and a kernel repository of nearfar.
#
#     hf auth login                                       (a token that may write to ORG)
#     recipes/upload.sh FOLDER ORG INSTALL                (a dry run: nothing is sent)
#     recipes/upload.sh FOLDER ORG INSTALL --yes
#
# INSTALL is what the cards tell their readers to give to `pip install`, such as git+https://HOST/REPO.
set -euo pipefail
if [ $# -lt 3 ] || [ $# -gt 4 ] || [ "${4:---yes}" != --yes ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
folder=$1 org=$2 install=$3 yes=${4:-}
kernel=$folder/nearfar-kernel
hf-efficient-attn export-kernel nearfar --repo "$org/nearfar" -o "$kernel" --force
if [ -n "$yes" ]; then
    hf upload "$org/nearfar" "$kernel" --repo-type kernel --revision v1
fi
for config in "$folder"/*/efficient_attention.json; do # the converted checkpoints
    checkpoint=$(dirname "$config")
    hf-efficient-attn push "$checkpoint" "$org/$(basename "$checkpoint")" --install "$install" $yes
done
