// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <string>

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // softmax(softcap tanh(scale q k^T / softcap) + bias - alibi_slopes |i - j|) v, a block at a time. q
  // (batch, heads, tokens, head_dim), k and v (batch, kv heads, keys, features); or packed (tokens, heads,
  // features), with the offsets of the sequences, int32 (sequences + 1). causal and window (left, right; -1:
  // all) are aligned at the last query and key. bias (batch, heads, queries, keys), any of them 1; packed
  // (heads, queries of all, keys of a sequence); bool: true where a key is seen. sinks (heads): scores of a
  // key without a value. Where a query sees nothing, out is 0. Gradients by q, k, v, bias, sinks, and of lse.
  // deterministic: the same bits in each run, so no operators of PyTorch's; None: as PyTorch is told.
  const std::string attended =
      "Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? sinks=None, *, bool causal=False, int[] "
      "window=[-1, -1], float softcap=0., float? scale=None, Tensor? alibi_slopes=None, Tensor? "
      "cu_seqlens_q=None, Tensor? cu_seqlens_k=None, float dropout_p=0., Tensor? seed=None, bool? "
      "deterministic=None";
  m.def(("attention(" + attended + ") -> Tensor").c_str());
  // lse: log-sum-exp of the scores (and the sink), fp32: (batch, heads, queries), packed (heads, queries).
  m.def(("attention_with_lse(" + attended + ") -> (Tensor out, Tensor lse)").c_str());
  // Those that output_mask asks for, the others empty.
  m.def(
      ("attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, bool[5] output_mask, " +
       attended + ") -> (Tensor grad_q, Tensor grad_k, Tensor grad_v, Tensor grad_bias, Tensor grad_sinks)")
          .c_str());
  // The bin, from 0 on, that each sequence is put into, so that none has more than capacity tokens: the
  // longest first, each into the first bin with room for it. lengths (sequences) int64, on the CPU.
  m.def("pack_sequences(Tensor lengths, int capacity) -> Tensor");
}
