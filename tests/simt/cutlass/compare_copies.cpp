// Tensor copies and tensor maps against CuTe's layouts in shared memory and against the parameters that CuTe
// passes to the driver.

#include "compare.h"
#include "cute.h"
#include "driver.h"

namespace twins {
namespace {

alignas(16) uint16_t tensor_memory[1];  // only the address is used

// Compares the place at which a copy of `rows` rows of 64 columns puts each element.
template <int rows>
void compare_swizzle() {
  const auto layout = cute::as_position_independent_swizzle_layout(cute::tile_to_shape(
      cute::SM90::GMMA::Layout_K_SW128_Atom<cute::half_t>{}, cute::Shape<cute::Int<rows>, cute::_64>{}));
  std::vector<uint16_t> tensor(rows * 64);
  for (int i = 0; i < rows * 64; ++i) tensor[i] = static_cast<uint16_t>(i + 1);
  const Copy copy{{64, rows, 1}, {128, rows * 128}, {64, rows, 1}, {0, 0, 0}};
  const std::vector<uint16_t> shared = copy.run(tensor);
  std::vector<int64_t> expected(rows * 64, -1);
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < 64; ++column)
      expected[static_cast<int>(layout(row, column))] = tensor[row * 64 + column];
  }
  compare("tensor copy of " + std::to_string(rows) + " rows: swizzle of 128 bytes", as_table(shared),
          expected);
}

struct Shape {
  int features, tokens, heads, batch;
  int64_t token, head, sequence;  // strides in elements
};

// The parameters of a map for boxes of `rows` tokens and 64 features, as CuTe encodes it.
template <class T, int rows>
std::vector<int64_t> encode_by_cute(const Shape& s) {
  const auto tensor = cute::make_tensor(cute::make_gmem_ptr(reinterpret_cast<T*>(tensor_memory)),
                                        cute::make_shape(s.tokens, s.features, s.heads, s.batch),
                                        cute::make_stride(s.token, cute::_1{}, s.head, s.sequence));
  const auto tile = cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<T>{},
                                        cute::Shape<cute::Int<rows>, cute::_64>{});
  static_cast<void>(cute::make_tma_copy(cute::SM90_TMA_LOAD{}, tensor, tile));
  return recorded_map();
}

// Drops what the emulator does not have: type, element strides, interleave, swizzle and fill.
std::vector<int64_t> without_modes(const std::vector<int64_t>& map) {
  std::vector<int64_t> all{map[1], map[2]};
  for (size_t i = 3; i + 3 < map.size(); i += 4) all.insert(all.end(), {map[i], map[i + 1], map[i + 2]});
  return all;
}

template <class T, int rows>
void compare_maps(const char* name, const Shape& s) {
  const std::vector<int64_t> sizes{s.features, s.tokens, s.heads, s.batch};
  const std::vector<int64_t> strides{s.token * 2, s.head * 2, s.sequence * 2};
  const std::vector<int> box{64, rows, 1, 1};
  const char* error = encode_for_gpu(tensor_memory, 4, sizes.data(), strides.data(), box.data());
  const std::vector<int64_t> on_gpu = error == nullptr ? recorded_map() : std::vector<int64_t>{};
  const std::vector<int64_t> by_cute = encode_by_cute<T, rows>(s);
  const std::string of = std::string("tensor map of ") + name + ": ";
  compare(of + "parameters on a GPU", on_gpu, by_cute);
  compare(of + "parameters in the emulator", encode(tensor_memory, sizes, strides, box),
          without_modes(by_cute));
  compare(of + "parameters of the attention kernels",
          encode_attention(tensor_memory, s.features, s.tokens, s.heads, s.batch, s.token, s.head, s.sequence,
                           rows),
          without_modes(by_cute));
}

}  // namespace

void compare_copies() {
  compare_swizzle<8>();
  compare_swizzle<48>();
  compare_swizzle<64>();
  compare_swizzle<128>();
  compare_swizzle<256>();
  compare_maps<cute::bfloat16_t, 128>("tokens before heads", {96, 300, 4, 3, 4 * 96, 96, 300 * 4 * 96});
  compare_maps<cute::half_t, 64>("heads before tokens", {64, 77, 8, 2, 64, 77 * 64, 8 * 77 * 64});
  compare_maps<cute::half_t, 96>("queries, keys and values in one tensor",
                                 {128, 1000, 16, 5, 3 * 16 * 128, 3 * 128, 1000 * 3 * 16 * 128});
  compare_maps<cute::bfloat16_t, 48>("one past 2^31 elements",
                                     {256, 1 << 20, 32, 2, 32 * 256, 256, int64_t{1} << 33});
}

}  // namespace twins
