#!/bin/sh
# Compiler launcher for the CUDA kernels: runs the compiler and writes the output of ptxas (-Xptxas -v) to
# OBJECT.ptxas, next to the object file. All other messages go to stderr. scripts/check_ptxas.py reads
# OBJECT.ptxas. ccache replays the messages of the compiler, so the file is also written if ccache has the
# object.
object=
previous=
for argument; do
  [ "$previous" != -o ] || object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" 2>"$object.messages"
status=$?
# The figures of ptxas are the lines that begin with "ptxas info", and an indented line after each "Function
# properties".
grep -E '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.messages" >"$object.ptxas"
grep -vE '^ptxas info|^ +[0-9]+ bytes stack frame' "$object.messages" >&2
rm -f "$object.messages"
exit $status
