// Kernels that run one emulated instruction each.

#include "twins.h"

#include <stdexcept>

#include "../device_array.h"
#include "cuda/attention/attention_hopper.h"
#include "cuda/core/launch.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/wgmma.h"

namespace twins {
namespace {

using namespace shoestring::cuda;
using simt_tests::DeviceArray;

void check(const char* error) {
  if (error != nullptr) throw std::runtime_error(error);
}

// Shared memory begins 16 bytes after a multiple of 1024 in the emulator, as it may on a GPU.
__device__ unsigned char* aligned_shared() {
  unsigned char* p = dynamic_shared();
  return p + (1024 - reinterpret_cast<uintptr_t>(p) % 1024) % 1024;
}

__device__ void fill_shared(const uint16_t* image, int elements) {
  for (int i = threadIdx.x; i < elements; i += static_cast<int>(blockDim.x))
    reinterpret_cast<uint16_t*>(aligned_shared())[i] = image[i];
}

template <Type type>
__global__ void multiply_fragments(const uint32_t* a, const uint32_t* b, float* c) {
  uint32_t own_a[4], own_b[2];
  float sums[4];
  const int lane = threadIdx.x;
  for (int i = 0; i < 4; ++i) own_a[i] = a[lane * 4 + i];
  for (int i = 0; i < 2; ++i) own_b[i] = b[lane * 2 + i];
  for (int i = 0; i < 4; ++i) sums[i] = c[lane * 4 + i];
  if constexpr (type == Type::tf32) {
    mma_16x8x8_tf32(sums, own_a, own_b);
  } else if constexpr (type == Type::bf16) {
    mma_16x8x16<__nv_bfloat16>(sums, own_a, own_b);
  } else {
    mma_16x8x16<__half>(sums, own_a, own_b);
  }
  for (int i = 0; i < 4; ++i) c[lane * 4 + i] = sums[i];
}

template <int count, bool transposed>
__global__ void load_matrices(const uint16_t* image, int elements, const int* row, uint32_t* out) {
  fill_shared(image, elements);
  __syncthreads();
  const uint16_t* address = reinterpret_cast<const uint16_t*>(aligned_shared()) + row[threadIdx.x];
  uint32_t own[count];
  if constexpr (transposed) {
    ldmatrix_trans(own, address);
  } else {
    ldmatrix(own, address);
  }
  for (int i = 0; i < count; ++i) out[threadIdx.x * count + i] = own[i];
}

struct Operands {
  int a_at, a_panel, b_at, b_panel, step;
};

template <class T, int n, bool b_is_kn, bool a_in_registers>
__global__ void multiply_tiles(const uint16_t* image, int elements, Operands at, const uint32_t* a, float* d,
                               uint64_t* descriptors) {
  fill_shared(image, elements);
  async_fence();
  __syncthreads();
  const uint64_t first = wgmma_operand(aligned_shared());
  const uint64_t a_tile = first + wgmma_bytes(at.a_at) + wgmma_step(at.step, false, at.a_panel);
  const uint64_t b_tile = first + wgmma_bytes(at.b_at) + (b_is_kn ? wgmma_rows_together(at.b_panel) : 0) +
                          wgmma_step(at.step, b_is_kn, at.b_panel);
  float sums[n / 8][4];
  uint32_t own[1][4] = {};
  for (int i = 0; i < n / 2; ++i) sums[i / 4][i % 4] = d[threadIdx.x * (n / 2) + i];
  for (int i = 0; i < 4 && a_in_registers; ++i) own[0][i] = a[threadIdx.x * 4 + i];
  wgmma_pin(own);
  wgmma_fence(sums);
  if constexpr (a_in_registers) {
    wgmma<T, b_is_kn>(sums, own[0], b_tile, true);
  } else {
    wgmma<T, b_is_kn>(sums, a_tile, b_tile, true);
  }
  wgmma_commit();
  wgmma_wait<0>(sums);
  for (int i = 0; i < n / 2; ++i) d[threadIdx.x * (n / 2) + i] = sums[i / 4][i % 4];
  if (threadIdx.x == 0) {
    descriptors[0] = a_tile;
    descriptors[1] = b_tile;
    descriptors[2] = shared_address(aligned_shared());
  }
}

template <int rank>
__global__ void copy_box(const __grid_constant__ TensorMap map, const int* at, int elements, uint16_t* out) {
  __shared__ Mbarrier full;
  unsigned char* tile = aligned_shared();
  if (threadIdx.x == 0) {
    int from[rank];
    for (int i = 0; i < rank; ++i) from[i] = at[i];
    mbarrier_init(full, 1);
    mbarrier_init_fence();
    mbarrier_arrive_expect(full, elements * 2);
    tma_load(tile, map, full, from);
  }
  __syncthreads();
  mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < elements; i += 32) out[i] = reinterpret_cast<const uint16_t*>(tile)[i];
}

template <int n>
using Multiply = void (*)(const uint16_t*, int, Operands, const uint32_t*, float*, uint64_t*);

// The kernels multiply by b (k, n) only where n is a multiple of 64, the width of a swizzled panel.
template <class T, int n>
Multiply<n> kernel_of(bool b_is_kn, bool a_in_registers) {
  if constexpr (n % 64 == 0) {
    if (b_is_kn) return a_in_registers ? multiply_tiles<T, n, true, true> : multiply_tiles<T, n, true, false>;
  }
  return a_in_registers ? multiply_tiles<T, n, false, true> : multiply_tiles<T, n, false, false>;
}

template <class T>
auto kernel_of(int n, bool b_is_kn, bool a_in_registers) {
  return n == 48    ? kernel_of<T, 48>(b_is_kn, a_in_registers)
         : n == 64  ? kernel_of<T, 64>(b_is_kn, a_in_registers)
         : n == 96  ? kernel_of<T, 96>(b_is_kn, a_in_registers)
         : n == 128 ? kernel_of<T, 128>(b_is_kn, a_in_registers)
         : n == 192 ? kernel_of<T, 192>(b_is_kn, a_in_registers)
                    : kernel_of<T, 256>(b_is_kn, a_in_registers);
}

std::vector<int64_t> numbers(const TensorMap& map, const char* error) {
  check(error);
  std::vector<int64_t> all{map.rank, reinterpret_cast<int64_t>(map.address)};
  for (int i = 0; i < map.rank; ++i) {
    for (const int64_t x : {map.sizes[i], i > 0 ? map.strides[i] : 0, int64_t{map.box[i]}}) all.push_back(x);
  }
  return all;
}

}  // namespace

std::vector<float> run_mma(Type type, const std::vector<uint32_t>& a, const std::vector<uint32_t>& b,
                           const std::vector<float>& c) {
  DeviceArray<uint32_t> device_a(a), device_b(b);
  DeviceArray<float> device_c(c);
  const auto kernel = type == Type::tf32   ? multiply_fragments<Type::tf32>
                      : type == Type::bf16 ? multiply_fragments<Type::bf16>
                                           : multiply_fragments<Type::fp16>;
  check(launch(kernel, 1, 32, 0, nullptr, device_a.data(), device_b.data(), device_c.data()));
  return device_c.to_host();
}

std::vector<uint32_t> run_ldmatrix(int count, bool transposed, const std::vector<uint16_t>& image,
                                   const std::vector<int>& row) {
  DeviceArray<uint16_t> device_image(image);
  DeviceArray<int> device_row(row);
  DeviceArray<uint32_t> out{std::vector<uint32_t>(32 * count)};
  const auto kernel = transposed ? (count == 1   ? load_matrices<1, true>
                                    : count == 2 ? load_matrices<2, true>
                                                 : load_matrices<4, true>)
                                 : (count == 1   ? load_matrices<1, false>
                                    : count == 2 ? load_matrices<2, false>
                                                 : load_matrices<4, false>);
  const int elements = static_cast<int>(image.size());
  check(launch(kernel, 1, 32, elements * 2 + 1024, nullptr, device_image.data(), elements, device_row.data(),
               out.data()));
  return out.to_host();
}

void Product::run() {
  DeviceArray<uint16_t> device_image(image);
  DeviceArray<uint32_t> device_a(a.empty() ? std::vector<uint32_t>(4) : a);
  DeviceArray<float> sums(c);
  DeviceArray<uint64_t> descriptors{std::vector<uint64_t>(3)};
  const auto kernel = type == Type::bf16 ? kernel_of<__nv_bfloat16>(n, b_is_kn, a_in_registers)
                                         : kernel_of<__half>(n, b_is_kn, a_in_registers);
  const int elements = static_cast<int>(image.size());
  check(launch(kernel, 1, 128, elements * 2 + 1024, nullptr, device_image.data(), elements,
               Operands{a_at, a_panel, b_at, b_panel, step}, device_a.data(), sums.data(),
               descriptors.data()));
  d = sums.to_host();
  const std::vector<uint64_t> back = descriptors.to_host();
  a_descriptor = back[0];
  b_descriptor = back[1];
  image_at = back[2];
}

std::vector<uint16_t> Copy::run(std::vector<uint16_t> tensor) const {
  // The address of a tensor is a multiple of 16.
  alignas(16) static uint16_t memory[1 << 16];
  if (tensor.size() > 1 << 16) throw std::runtime_error("a tensor of at most 65,536 elements");
  std::copy(tensor.begin(), tensor.end(), memory);
  simt::add_memory(memory, tensor.size() * 2);
  TensorMap map;
  const int rank = static_cast<int>(sizes.size());
  check(encode_tensor_map(&map, memory, rank, sizes.data(), strides.data(), box.data()));
  int elements = 1;
  for (const int x : box) elements *= x;
  DeviceArray<int> device_at(at);
  DeviceArray<uint16_t> out{std::vector<uint16_t>(elements)};
  const auto kernel = rank == 3 ? copy_box<3> : rank == 4 ? copy_box<4> : copy_box<5>;
  check(launch(kernel, 1, 32, elements * 2 + 1024, nullptr, map, device_at.data(), elements, out.data()));
  simt::remove_memory(memory);
  return out.to_host();
}

std::vector<int64_t> encode(const void* address, const std::vector<int64_t>& sizes,
                            const std::vector<int64_t>& strides, const std::vector<int>& box) {
  TensorMap map;
  const char* error = encode_tensor_map(&map, address, static_cast<int>(sizes.size()), sizes.data(),
                                        strides.data(), box.data());
  return numbers(map, error);
}

std::vector<int64_t> encode_attention(const void* tensor, int64_t features, int64_t tokens, int64_t heads,
                                      int64_t batch, int64_t token, int64_t head, int64_t sequence,
                                      int rows) {
  TensorMap map;
  const char* error =
      encode_rows(&map, tensor, HeadStrides{sequence, head, token}, features, tokens, heads, batch, rows);
  return numbers(map, error);
}

}  // namespace twins
