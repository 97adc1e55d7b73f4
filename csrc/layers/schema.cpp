// Declares the operators that csrc/layers implements.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Drops each element of x with probability p and divides the remaining elements by 1 - p. The mask depends
  // only on the seed, one int64, and the index of the element. Backward recomputes the mask instead of saving
  // it.
  m.def("seeded_dropout(Tensor x, Tensor seed, float p) -> Tensor");
  // embedding returns the rows ids (any shape, int64 or int32) of weight (rows, features).
  // _embedding_backward returns the dense gradient of the weight. The row padding_idx gets no gradient;
  // scale_grad_by_freq divides the gradient of a row by the number of its ids.
  m.def(R"(embedding(Tensor ids, Tensor weight, *, int? padding_idx=None,
      bool scale_grad_by_freq=False) -> Tensor)");
  m.def(R"(_embedding_backward(Tensor grad_output, Tensor ids, SymInt rows, int? padding_idx,
      bool scale_grad_by_freq) -> Tensor)");
  // swiglu returns silu(gate) * up, and _swiglu_backward returns the gradients of gate and up.
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("_swiglu_backward(Tensor grad_output, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  // _swiglu_backward_ writes the gradients over gate and up, which backward no longer needs.
  m.def("_swiglu_backward_(Tensor grad_output, Tensor(a!) gate, Tensor(b!) up) -> ()");
  // geglu returns gelu(gate) * up, and _geglu_backward returns the gradients of gate and up. approximate:
  // 'tanh' or 'none', as in torch.nn.functional.gelu.
  m.def("geglu(Tensor gate, Tensor up, str approximate='none') -> Tensor");
  m.def("_geglu_backward(Tensor grad_output, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)");
  m.def("_geglu_backward_(Tensor grad_output, Tensor(a!) gate, Tensor(b!) up, str approximate) -> ()");
  // gelu returns gelu(x), and _gelu_backward returns the gradient of x. approximate: as for geglu.
  m.def("gelu(Tensor x, str approximate='none') -> Tensor");
  // _gelu_backward_ writes the gradient of x over x.
  m.def("_gelu_backward(Tensor grad_output, Tensor x, str approximate) -> Tensor");
  m.def("_gelu_backward_(Tensor grad_output, Tensor(a!) x, str approximate) -> ()");
  // Writes the gradient of x to grad_x, which may be x itself, and gelu(x) over grad_output.
  m.def("_gelu_backward_value_(Tensor(a!) grad_output, Tensor x, Tensor(b!) grad_x, str approximate) -> ()");
  // rms_norm returns y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension. add_rms_norm
  // normalises x + residual and also returns this sum. weight: (features), of any floating-point dtype.
  // upcast: the values that are rounded to a 16-bit dtype before the multiplication by the weight. 'llama':
  // the normalised x. 'gemma': none. 'none': the reciprocal root, the normalised x and the weight.
  // With out_dtype, y has that dtype: bf16 or fp16 for rows of fp32. x of that dtype may then be added to a
  // residual of fp32.
  m.def(R"(rms_norm(Tensor x, Tensor? weight=None, *, float eps, float offset=0.,
      str upcast='llama', ScalarType? out_dtype=None) -> Tensor)");
  m.def(R"(add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, float offset=0.,
      str upcast='llama', ScalarType? out_dtype=None) -> (Tensor y, Tensor sum))");
  // _rms_norm_forward and _rms_norm_backward compute rms_norm and add_rms_norm and their gradients. sum is x
  // + residual; it is empty without a residual. rstd has one value per row, fp64 for fp64, else fp32.
  // grad_sum, the gradient of sum, is added to grad_x. grad_weight is empty if it is not wanted.
  // rounded_grad_x is grad_x in the dtype of grad_y; it is empty unless rounded_x is true.
  m.def(R"(_rms_norm_forward(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset,
      str upcast, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum, Tensor rstd))");
  m.def(R"(_rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rstd,
      float offset, bool weight_grad, bool rounded_x=False) -> (Tensor grad_x, Tensor grad_weight,
      Tensor rounded_grad_x))");
  // layer_norm returns y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.
  // add_layer_norm normalises x + residual and also returns this sum, both in the dtype of the residual,
  // which may be fp32 while x is 16-bit. out_dtype: as for rms_norm.
  m.def(R"(layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps,
      ScalarType? out_dtype=None) -> Tensor)");
  m.def(R"(add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, *,
      float eps, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum))");
  // _layer_norm_forward and _layer_norm_backward compute layer_norm and add_layer_norm and their gradients.
  // As for RMSNorm, sum is empty if there is no residual, grad_sum is the upstream gradient of sum, and
  // rounded_grad_x is grad_x in the dtype of grad_y if rounded_x is true.
  m.def(R"(_layer_norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias,
      float eps, ScalarType? out_dtype=None) -> (Tensor y, Tensor sum, Tensor mean, Tensor rstd))");
  m.def(R"(_layer_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor? bias,
      Tensor mean, Tensor rstd, bool weight_grad, bool bias_grad, bool rounded_x=False) -> (Tensor grad_x,
      Tensor grad_weight, Tensor grad_bias, Tensor rounded_grad_x))");
  // Applies the rotary position embedding to q and k: (batch, heads, tokens, head_dim) or (tokens, heads,
  // head_dim), with any strides. q and k may have different numbers of heads.
  // cos and sin: (tokens, width) or (1 or batch, tokens, width). If position_ids are given, int64 (tokens) or
  // (1 or batch, tokens), cos and sin are (positions, width). width is rotary_dim / 2, or rotary_dim if each
  // angle is given twice.
  // The first rotary_dim elements of a head (None: all) are rotated in pairs. The elements of a pair are
  // adjacent if interleaved is true, else rotary_dim / 2 apart. With q_weight and k_weight (head_dim),
  // RMSNorm first normalises each head and multiplies it by (offset + weight).
  m.def(R"(rope(Tensor q, Tensor k, Tensor cos, Tensor sin, *, int? rotary_dim=None,
      bool interleaved=False, Tensor? position_ids=None, Tensor? q_weight=None, Tensor? k_weight=None,
      float eps=1e-06, float offset=0.) -> (Tensor, Tensor))");
  // Computes the gradients of rope. q and k must be given if there are weights. The gradients of q_weight and
  // k_weight are empty if weight_grad is false.
  m.def(R"(_rope_backward(Tensor grad_q, Tensor grad_k, Tensor? q, Tensor? k, Tensor cos, Tensor sin,
      int? rotary_dim, bool interleaved, Tensor? position_ids, Tensor? q_weight, Tensor? k_weight,
      float eps, float offset, bool weight_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight,
      Tensor grad_k_weight))");
  // Returns the rows that stochastic_depth keeps, int64 in ascending order, on the device. They depend on the
  // other arguments alone.
  m.def(R"(_stochastic_depth_rows(int seed, int step, int layer, float p, int rows,
      Device device) -> Tensor)");
}
