#!/bin/sh
# Compiler launcher for the CUDA kernels: runs the compiler, keeps what ptxas says (-Xptxas -v) beside the object file,
# in OBJECT.ptxas, and passes everything else on. scripts/check_ptxas.py reads it. ccache replays a compiler's messages,
# so the figures are also there where nothing was compiled.
object=
previous=
for argument; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" 2>"$object.messages"
status=$?
# ptxas' figures are lines that begin with its name, and one indented line after each "Function properties".
grep -E '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.messages" >"$object.ptxas"
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.messages" >&2
rm -f "$object.messages"
exit $status
