// The schemas of the operators in csrc/quantization. An operator whose name ends in _ changes its arguments
// in place.

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(shoestring, m) {
  // Quantises x to 4 bits per element, in blocks of block_size elements of the flattened x. Returns packed,
  // uint8 ((numel + 1) / 2), and absmax, fp32 (blocks), the largest magnitude of each block. With quant_type
  // 'nf4' or 'fp4' the bytes equal those of bitsandbytes. The values of 'int4' are (code - 8) * scale +
  // offset. Its absmax is int32, with the bf16 scale in the lower half and the bf16 offset in the upper half.
  m.def(R"(quantize_4bit(Tensor x, *, str quant_type='nf4', int block_size=64) -> (Tensor packed,
      Tensor absmax))");
  // Quantises absmax, the scales of a 4-bit tensor, to 8 bits (double quantisation). Returns uint8 codes in
  // the shape of absmax, which replace absmax, and nested, fp32 (257 + blocks / 256, rounded up). nested
  // holds an offset, the 256 values of the 8-bit type and one second-level scale per 256 codes.
  m.def("quantize_absmax(Tensor absmax) -> (Tensor codes, Tensor nested)");
  m.def(R"(dequantize_4bit(Tensor packed, Tensor absmax, Tensor? nested=None, *, SymInt[] shape,
      ScalarType dtype, str quant_type='nf4', int block_size=64) -> Tensor)");
  // Quantises each row of x (..., columns) to int8. Returns codes in the shape of x and absmax, fp32 (...),
  // the largest magnitude of each row. Code 127 stands for this magnitude. The bytes equal those of
  // bitsandbytes' LLM.int8() weights.
  m.def("quantize_int8(Tensor x) -> (Tensor packed, Tensor absmax)");
  m.def("dequantize_int8(Tensor packed, Tensor absmax, *, ScalarType dtype) -> Tensor");
  // Dequantises a 4-bit or int8 tensor into out, a contiguous tensor with the same number of elements.
  m.def(R"(dequantize_(Tensor(a!) out, Tensor packed, Tensor absmax, Tensor? nested=None, *,
      str quant_type='nf4', int block_size=64) -> ())");
  // Quantises x and dequantises the result to the dtype of x, for quantisation-aware training. The values are
  // those of quantize_4bit and dequantize_4bit or of the int8 operators, bit for bit. The gradient passes
  // through unchanged. double_quant quantises the scales by quantize_absmax as well. block_size None is 64;
  // 'int8' has one scale per row and takes none.
  m.def(R"(fake_quantize(Tensor x, *, str quant_type='nf4', int? block_size=None,
      bool double_quant=False) -> Tensor)");
  // Converts fp32 values to block-wise 8-bit optimizer state, or back. The state has codes in the shape of x
  // and one scale per 256 elements. With signed=False, x must not be negative, and only zero itself gets the
  // code of zero.
  m.def("quantize_8bit(Tensor x, *, bool signed) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_8bit(Tensor codes, Tensor scale, *, bool signed) -> Tensor");
  // Converts fp32 values to 4-bit optimizer state, or back. The state is flat and has whole blocks of 256
  // elements. Each block has 128 bytes of codes and one scale per 32 (signed) or 128 (unsigned) elements. If
  // `step`, the number of the optimizer step, is given, rounding is dithered from step to step, as optimizers
  // need for moments that change slowly.
  m.def("quantize_state_4bit(Tensor x, *, bool signed, int? step=None) -> (Tensor codes, Tensor scale)");
  m.def("dequantize_state_4bit(Tensor codes, Tensor scale, *, bool signed, SymInt numel) -> Tensor");
  // Compresses a gradient to 8, 4 or 1 bits with error feedback: adds it to error, writes the codes of the
  // sums, and subtracts what the codes stand for from error. codes is uint8 with a record for each block of
  // elements; csrc/quantization/compress_gradient_table.h describes it. error and codes are contiguous.
  m.def(R"(compress_gradient_(Tensor(a!) error, Tensor gradient, Tensor(b!) codes, *, int bits) -> ())");
  // Writes the mean of compressed gradients to out. Each row of codes (ranks, bytes) holds one of them.
  m.def("decompress_mean_(Tensor(a!) out, Tensor codes, *, int bits) -> ()");
  // A quantised weight, in this file and in the schemas of the losses, consists of packed and absmax, the
  // results of quantize_4bit or quantize_int8. If nested is given, absmax holds the codes that
  // quantize_absmax returns. For quant_type 'int8', block_size is the length of a row.
  //
  // quantized_linear computes x W^T + bias for x (..., in_features) and a frozen quantised weight W
  // (out_features, in_features). The weight is dequantised one panel of rows at a time, never as a whole. x
  // and bias receive gradients.
  m.def(R"(quantized_linear(Tensor x, Tensor packed, Tensor absmax, Tensor? nested=None,
      Tensor? bias=None, *, SymInt out_features, str quant_type='nf4', int block_size=64) -> Tensor)");
  m.def(R"(_quantized_linear_backward(Tensor grad_output, Tensor packed, Tensor absmax, Tensor? nested, *,
      SymInt in_features, str quant_type, int block_size) -> Tensor)");
}
