// Schemas of the operators in csrc/layers.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Drops each element of x with probability p and divides the other elements by 1 - p. The mask is a
  // function of the seed, one int64, and the index of the element. Backward computes the mask again, so
  // nothing is saved.
  m.def("seeded_dropout(Tensor x, Tensor seed, float p) -> Tensor");
  // Returns silu(gate) * up.
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad_output, Tensor gate, Tensor up) -> (Tensor, Tensor)");
  // Returns gelu(gate) * up. approximate: 'tanh' or 'none'.
  m.def("geglu(Tensor gate, Tensor up, str approximate='tanh') -> Tensor");
  m.def("geglu_backward(Tensor grad_output, Tensor gate, Tensor up, str approximate) -> (Tensor, Tensor)");
  // Returns y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension. add_rms_norm
  // normalises x + residual and also returns this sum. casting: what is rounded to 16 bits before the last
  // multiplication. 'llama' rounds the first factor, 'gemma' nothing and 'none' everything. weight is
  // (features), of any floating-point dtype.
  m.def(R"(rms_norm(Tensor x, Tensor? weight=None, *, float eps, float offset=0.,
      str casting='llama') -> Tensor)");
  m.def(R"(add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, *, float eps, float offset=0.,
      str casting='llama') -> (Tensor y, Tensor sum))");
  // The operators that compute rms_norm and its gradients. sum is empty without a residual. rstd has one fp32
  // number for each row (fp64 for fp64). grad_sum is added to grad_x. grad_weight is empty if it is not
  // wanted.
  m.def(R"(rms_norm_forward(Tensor x, Tensor? residual, Tensor? weight, float eps, float offset,
      str casting) -> (Tensor y, Tensor sum, Tensor rstd))");
  m.def(R"(rms_norm_backward(Tensor grad_y, Tensor? grad_sum, Tensor x, Tensor? weight, Tensor rstd,
      float offset, bool weight_grad) -> (Tensor grad_x, Tensor grad_weight))");
  // Returns (x - mean) / sqrt(variance + eps) * weight + bias over the last dimension.
  m.def("layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, *, float eps) -> Tensor");
  m.def(R"(layer_norm_forward(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y,
      Tensor mean, Tensor rstd))");
  m.def(R"(layer_norm_backward(Tensor grad_y, Tensor x, Tensor? weight, Tensor? bias, Tensor mean,
      Tensor rstd, bool weight_grad, bool bias_grad) -> (Tensor grad_x, Tensor grad_weight,
      Tensor grad_bias))");
  // Applies the rotary position embedding to q and k: (batch, heads, tokens, head_dim) or (tokens, heads,
  // head_dim), with any strides. q and k may have different numbers of heads.
  // cos and sin: (tokens, width) or (1 or batch, tokens, width). With position_ids, int64 (tokens) or (1 or
  // batch, tokens), they are (positions, width). width is rotary_dim / 2, or rotary_dim if each angle is
  // given twice.
  // The first rotary_dim elements (None: all) are rotated in pairs. Pairs are adjacent elements if
  // interleaved, else elements that are rotary_dim / 2 apart. With q_weight and k_weight (head_dim), each
  // head is first normalised by RMSNorm with the factor (offset + weight).
  m.def(R"(rope(Tensor q, Tensor k, Tensor cos, Tensor sin, *, int? rotary_dim=None,
      bool interleaved=False, Tensor? position_ids=None, Tensor? q_weight=None, Tensor? k_weight=None,
      float eps=1e-06, float offset=0.) -> (Tensor, Tensor))");
  // Computes the gradients of rope. q and k are given if there are weights. A weight's gradient is empty if
  // it is not wanted.
  m.def(R"(rope_backward(Tensor grad_q, Tensor grad_k, Tensor? q, Tensor? k, Tensor cos, Tensor sin,
      int? rotary_dim, bool interleaved, Tensor? position_ids, Tensor? q_weight, Tensor? k_weight,
      float eps, float offset, bool weight_grad) -> (Tensor grad_q, Tensor grad_k, Tensor grad_q_weight,
      Tensor grad_k_weight))");
}
