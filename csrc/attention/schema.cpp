// Schemas of the operators in csrc/attention.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Computes softmax(softcap tanh(scale q k^T / softcap) + bias - alibi_slopes |i - j|) v, one block at a
  // time.
  // Shapes: q (batch, heads, tokens, head_dim), k and v (batch, kv heads, keys, features). If packed,
  // (tokens, heads, features), and cu_seqlens are the int32 offsets of the sequences, (sequences + 1).
  // causal and window (left, right; -1: all) are aligned at the last query and the last key.
  // bias: (batch, heads, queries, keys), any of them 1; if packed, (heads, queries of all sequences, keys of
  // a sequence). A bool bias is true for keys that a query sees.
  // sinks (heads): the score of one more key without a value.
  // If a query sees no key, its output is 0. Differentiable with respect to q, k, v, bias and sinks; lse may
  // have a gradient, too.
  // deterministic: True gives the same bits in every run and excludes PyTorch's operators. None follows
  // PyTorch's own setting.
  const std::string attended =
      "Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? sinks=None, *, bool causal=False, int[] "
      "window=[-1, -1], float softcap=0., float? scale=None, Tensor? alibi_slopes=None, Tensor? "
      "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, float dropout_p=0., Tensor? seed=None, bool? "
      "deterministic=None";
  m.def(("attention(" + attended + ") -> Tensor").c_str());
  // Also returns lse, the log-sum-exp of the scores and the sink, in fp32: (batch, heads, queries); if
  // packed, (heads, queries).
  m.def(("attention_with_lse(" + attended + ") -> (Tensor out, Tensor lse)").c_str());
  // Returns the gradients that output_mask selects. The others are empty.
  m.def(
      ("attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[5] output_mask, " +
       attended + ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_sinks)")
          .c_str());
  // Returns the number of the bin, from 0 on, into which each sequence is put. No bin holds more than
  // `capacity` tokens. The longest sequence comes first, and each sequence goes into the first bin with
  // enough room. lengths: (sequences), int64, on the CPU.
  m.def("pack_sequences(Tensor lengths, int capacity) -> Tensor");
}
