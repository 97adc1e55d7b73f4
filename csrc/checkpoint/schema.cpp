// Operator schemas of gradient checkpointing and of its planner.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Returns x itself. If a surrounding checkpoint has the tag in its `keep`, the checkpoint stores the
  // results of the operator that made x. Backward then does not compute them again. x must not have been
  // modified in place.
  m.def("tag_activation(Tensor x, str tag) -> Tensor");
  // Returns the rows at which the tiles of a weight (rows, columns) begin, and `rows` itself. They are
  // multiples of 256 elements of the weight where the number of tiles allows it.
  m.def("_tile_rows(int rows, int columns, int tiles) -> int[]");
  // _tile_source returns what _tile_input needs to return a view of x for one tile of a layer. The gradients
  // of all tiles are summed in fp32 if x has a 16-bit dtype.
  m.def("_tile_source(Tensor x) -> Tensor");
  m.def("_tile_input(Tensor x, Tensor source) -> Tensor");
  // Returns the operator names in `keep`, the list of results that a checkpoint stores. The name of a group
  // is replaced by the names of its operators, and tags are left out.
  m.def("_checkpoint_operators(str[] keep) -> str[]");
  // Lists the choices of a plan: the ways to treat the activations of a block. Each choice has four values:
  // - names: its name;
  // - recomputed: whether the block is recomputed;
  // - keep: the operators whose results are stored although the block is recomputed;
  // - offloaded: whether saved tensors are offloaded.
  m.def("_checkpoint_choices() -> (str[] names, bool[] recomputed, str[][] keep, bool[] offloaded)");
  // Plans a sequence of blocks. For each block, finds the choice that minimises the time of forward and
  // backward within a memory budget in bytes. shoestring/checkpoint/checkpoint_plan.h describes the cost
  // model and the results.
  // - choices: the number of choices of each block; `bytes` and the lists after it concatenate the choices of
  //   all blocks.
  // - result pending: for each block, how many bytes of earlier blocks may still wait for their copy to the
  //   host when the block begins.
  // - result least_seconds: a lower bound on the time of every plan.
  //
  // simulate_checkpoint_plan predicts pending, peak and seconds for a given plan. checkpoint_frontier returns
  // all plans that are the fastest for some budget.
  const std::string planned =
      "(float[] forward_seconds, float[] backward_seconds, int[] choices, int[] bytes, float[] "
      "extra_seconds, int[] link_bytes, int[] forward_bytes, int[] backward_bytes, int[] gradient_bytes, ";
  const std::string link =
      "float out_bytes_per_second=0., float in_bytes_per_second=0., float copy_share=0., int prefetch=1) -> ";
  const std::string result = "int[] pending, int peak, float seconds";
  m.def(("checkpoint_plan" + planned + "*, int budget, " + link + "(int[] plan, " + result +
         ", float least_seconds)")
            .c_str());
  m.def(("simulate_checkpoint_plan" + planned + "int[] plan, *, int budget, " + link + "(" + result + ")")
            .c_str());
  m.def(("checkpoint_frontier" + planned + "*, " + link +
         "(int[][] plans, int[][] pending, int[] peaks, float[] seconds)")
            .c_str());
}
