// Declares the operators that csrc/adapters implements.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Returns the index of the first PEFT pattern that matches a module's name (-1 if none). Also returns the
  // text that the first group of the rule's regular expression matched: with rule 3, the layer number, unless
  // the pattern has groups. rule: the part of the name that the pattern must match (PatternRule in
  // csrc/adapters/pattern.h):
  // - 0: the whole name;
  // - 1: the whole name or its ending after a dot;
  // - 2: whole components anywhere in the name;
  // - 3: whole components that a layer number follows.
  // Raises ValueError for a pattern that is not supported.
  m.def("_match_patterns(str caller, str[] patterns, str name, int rule) -> (int, str)");
  // Returns config_digest of csrc/adapters/config_digest.h for the text of an adapter_config.json.
  m.def("_adapter_config_digest(str config) -> str");
  // Returns the fields of the adapter_config.json of a method, each with the name of Python's option ("" if
  // the field is not read).
  m.def("_adapter_config_fields(str method) -> Dict(str, str)");
  // Returns the method, the options in JSON and the digest of the text of an adapter_config.json. See
  // AdapterConfig in csrc/adapters/config_fields.h.
  m.def("_read_adapter_config(str place, str text, str[] methods) -> (str method, str options, str digest)");
  // Returns the initial lora_A and lora_B of a LoRA adapter that changes its base weight `dense`, and that
  // weight without their product. quantize, block_size, double_quant: how the caller will quantise the rest.
  m.def(R"(_lora_take_out(Tensor dense, str init, int rank, float alpha, bool rslora, int loftq_iterations,
      str? quantize, int block_size, bool double_quant) -> (Tensor rest, Tensor lora_A, Tensor lora_B))");
  // Returns gain * (x W^T + scaling * low B^T) + bias, where low = low_scale * dropped(x) A^T. The frozen
  // weight W is dense (out_features, in_features) in x's dtype or, if absmax is given, a quantised weight.
  // lora_A = A (rank, in_features), lora_B = B (out_features, rank), bias and gain (out_features) and
  // low_scale (tokens, rank) have any floating-point dtype. dropped(x) is seeded_dropout of x. If `gate` is
  // given, silu(gate) * x replaces x. Differentiable with respect to x, gate, bias, lora_A, lora_B and gain.
  m.def(R"(lora_linear(Tensor x, Tensor weight, Tensor? absmax, Tensor? nested, Tensor? bias,
      Tensor? lora_A, Tensor? lora_B, *, Tensor? gain=None, Tensor? low_scale=None, Tensor? gate=None,
      Tensor? seed=None, float dropout=0., float scaling=1., str quant_type='nf4',
      int block_size=64) -> Tensor)");
  // Computes lora_linear for several layers that read the same input with the same dropout. `layers` is a
  // flat list: weight, absmax, nested, bias, lora_A, lora_B, gain and low_scale of the first layer, then of
  // the second, and so on.
  const std::string group =
      "Tensor?[] layers, Tensor? gate, Tensor? seed, float dropout, float[] scaling, str[] quant_type, int[] "
      "block_size";
  m.def(("lora_linear_group(Tensor x, " + group + ") -> Tensor[]").c_str());
  // Forward of lora_linear_group without autograd. Returns the outputs of all layers and `low` (see
  // lora_linear) of all layers, concatenated as (tokens, sum of ranks).
  m.def(("_lora_linear_group_forward(Tensor x, " + group + ") -> (Tensor[], Tensor)").c_str());
  // Backward of lora_linear_group. output_mask selects the gradients of x, of gate, and of lora_A, lora_B and
  // gain of each layer. A gradient that is not selected is returned as an empty tensor. outputs: the forward
  // results of the layers whose gain needs a gradient.
  m.def(("_lora_linear_group_backward(Tensor?[] grad_outputs, Tensor?[] outputs, Tensor x, Tensor low, " +
         group + ", bool[] output_mask) -> Tensor[]")
            .c_str());
  // Returns the norm of each row of weight + scaling * lora_B lora_A, shape (out_features), without a
  // temporary of the weight's size. Not differentiable.
  m.def(R"(lora_weight_norm(Tensor weight, Tensor? absmax, Tensor? nested, Tensor lora_A, Tensor lora_B,
      *, float scaling=1., str quant_type='nf4', int block_size=64) -> Tensor)");
}
