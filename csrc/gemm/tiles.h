#pragma once

namespace shoestring::gemm {

/// Returns whether products of bf16 matrices run on the tiles of AMX. It implies multiplies_bf16().
bool multiplies_by_tiles();

}  // namespace shoestring::gemm
