// The schemas of this room's operators. An operator whose name ends in _ changes its arguments in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // x in blocks of block_size along its flattened elements, each element 4 bits times the block's largest
  // magnitude: packed uint8 ((numel + 1) / 2), absmax fp32 (blocks). The bytes are bitsandbytes'. quant_type:
  // 'nf4', 'fp4' or 'int4', whose elements are (code - 8) * scale + offset: absmax int32, with the bf16 scale
  // in the lower half, the offset above.
  m.def(R"(quantize_4bit(Tensor x, *, str quant_type='nf4', int block_size=64) -> (Tensor packed,
      Tensor absmax))");
  // The scales in 8 bits (double quantisation): codes uint8 like absmax, and nested fp32 (257 + blocks /
  // 256): the offset, the 256 values of the 8-bit type, and a scale for every 256 codes. The codes then stand
  // for absmax.
  m.def("quantize_absmax(Tensor absmax) -> (Tensor codes, Tensor nested)");
  m.def(R"(dequantize_4bit(Tensor packed, Tensor absmax, Tensor? nested=None, *, SymInt[] shape,
      ScalarType dtype, str quant_type='nf4', int block_size=64) -> Tensor)");
  // Each row of x (..., columns) as int8 codes (x's shape) and its largest magnitude, absmax fp32 (...),
  // which the code 127 stands for. The bytes are those of bitsandbytes' LLM.int8() weights.
  m.def("quantize_int8(Tensor x) -> (Tensor packed, Tensor absmax)");
  m.def("dequantize_int8(Tensor packed, Tensor absmax, *, ScalarType dtype) -> Tensor");
  // Either of them into out, contiguous, whose elements the parts stand for.
  m.def(R"(dequantize_(Tensor(a!) out, Tensor packed, Tensor absmax, Tensor? nested=None, *,
      str quant_type='nf4', int block_size=64) -> ())");
  // Block-wise 8-bit state from values and back: codes of x's shape, and a scale for each 256 elements. An
  // unsigned map (signed=False, for x >= 0) has no zero but for zero itself.
  m.def("quantize_8bit(Tensor x, *, bool signed) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_8bit(Tensor codes, Tensor scale, *, bool signed) -> Tensor");
  // The same in 4 bits, flat and in whole blocks of 256: 128 bytes of codes each, and a scale for each 32
  // (signed) or 128 elements. With a step, rounded as optimizers round what moves slowly: up or down by turns
  // from step to step.
  m.def("quantize_state_4bit(Tensor x, *, bool signed, int? step=None) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_state_4bit(Tensor codes, Tensor scale, *, bool signed, SymInt numel) -> Tensor");
  // A quantised weight, here and in the losses, is packed and absmax of quantize_4bit (nested:
  // with the codes of quantize_absmax for absmax), or of quantize_int8, with quant_type 'int8' and block_size
  // the length of a row.
  // x (..., in_features) times the transpose of a frozen quantised weight (out_features, in_features), plus
  // bias. The weight is dequantised a panel of rows at a time, never whole. Gradients by x and bias.
  m.def(R"(quantized_linear(Tensor x, Tensor packed, Tensor absmax, Tensor? nested=None,
      Tensor? bias=None, *, SymInt out_features, str quant_type='nf4', int block_size=64) -> Tensor)");
  m.def(R"(quantized_linear_backward(Tensor grad_output, Tensor packed, Tensor absmax, Tensor? nested, *,
      SymInt in_features, str quant_type, int block_size) -> Tensor)");
}
