#!/bin/sh
# Compiler launcher for the CUDA kernels: runs the compiler and writes the output of ptxas (-Xptxas -v) to
# OBJECT.ptxas, next to the object file OBJECT, for scripts/check_ptxas.py. Other messages go to stderr. If
# ccache already has the object file, it replays the compiler's messages, so OBJECT.ptxas is written as well.
object=
previous=
for argument; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" 2>"$object.messages"
status=$?
# The output of ptxas consists of lines that begin with "ptxas info" and, for each function, an indented line
# with its stack frame and register spills.
grep -E '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.messages" >"$object.ptxas"
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.messages" >&2
rm -f "$object.messages"
exit $status
