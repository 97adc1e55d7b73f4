#pragma once

#include <optional>
#include <string>
#include <vector>

#include <shoestring/core/export.h>

namespace shoestring {

/// Averages the tensors of several checkpoints, and writes them to the safetensors file `out`. Example:
///
///     average_checkpoints({"step-900", "step-1000"}, "average/model.safetensors");
///
/// Each path is a safetensors file, or a Hugging Face model directory, sharded or not. `weights` are the
/// factors of the checkpoints, and must sum to 1 within 1e-6; without them, all checkpoints count equally.
///
/// Tensors in fp32, bf16 and fp16 are summed in fp32, and tensors in fp64 are summed in fp64. The result has
/// the dtype of the checkpoints. Tensors of other dtypes, such as integers and quantised weights, must be
/// equal in all checkpoints, and are copied. The metadata is that of the first file.
///
/// Tensors are read one at a time. Memory: the largest tensor in its own dtype and once more in fp32 or fp64.
///
/// Throws c10::Error if the checkpoints differ in names, shapes, dtypes or integers, if a file is damaged, or
/// if `out` cannot be written. An existing file is unchanged then. `out` may be one of the files that are
/// read.
SHOESTRING_API void average_checkpoints(const std::vector<std::string>& paths, const std::string& out,
                                        const std::optional<std::vector<double>>& weights = std::nullopt);

}  // namespace shoestring
