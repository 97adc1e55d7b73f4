// mma and ldmatrix against CuTe's traits of these instructions.

#include "compare.h"
#include "cute.h"

namespace twins {
namespace {

// Fragments of an mma. The registers are filled, and the results read, as CuTe's layouts say. Each table of a
// fragment shows, for every element of the matrix, which register of which lane the twin took it from.
template <class Operation, int k>
void compare_mma(Type type) {
  using Traits = cute::MMA_Traits<Operation>;
  static_assert(std::is_same_v<typename Traits::Shape_MNK, cute::Shape<cute::_16, cute::_8, cute::Int<k>>>);
  const typename Traits::ALayout a_layout{};
  const typename Traits::BLayout b_layout{};
  const typename Traits::CLayout c_layout{};
  constexpr int m = 16, n = 8, a_values = m * k / 32, b_values = n * k / 32;
  const std::string name = std::string("mma m16n8k") + std::to_string(k) + " " + name_of(type) + ": ";
  using Matrix = std::function<float(int, int)>;
  const auto multiply = [&](std::vector<uint32_t> a, std::vector<uint32_t> b, const Matrix& c) {
    std::vector<float> sums(32 * 4);
    for (int i = 0; i < 32 * 4; ++i) {
      const int at = static_cast<int>(c_layout(i / 4, i % 4));
      sums[i] = c(at % m, at / m);
    }
    return run_mma(type, a, b, sums);
  };
  const auto of_a = [&](const Matrix& f) { return registers(type, a_layout, 32, a_values, m, f); };
  const auto of_b = [&](const Matrix& f) {  // CuTe numbers b as (n, k)
    return registers(type, b_layout, 32, b_values, n, [&](int column, int row) { return f(row, column); });
  };
  const auto zero = [](int, int) { return 0.f; };
  // The register that holds each element, as the layout says.
  const auto places = [](auto layout, int values) {
    std::vector<int64_t> all(32 * values, -1);
    for (int t = 0; t < 32; ++t) {
      for (int v = 0; v < values; ++v) all[static_cast<int>(layout(t, v))] = t * values + v;
    }
    return all;
  };

  // Packed registers whose element v of lane t is the number t * values + v, which is exact in 16 bits.
  const auto numbered = [&](int values) {
    const int per = type == Type::tf32 ? 1 : 2;
    std::vector<uint32_t> all(32 * values / per);
    for (int i = 0; i < 32 * values; ++i)
      all[i / per] |= bits_of(type, static_cast<float>(i)) << i % per * 16;
    return all;
  };
  std::vector<int64_t> found(m * k, -1);
  for (int first = 0; first < k; first += n) {
    const auto d =
        multiply(numbered(a_values),
                 of_b([&](int row, int column) { return row == first + column ? 1.f : 0.f; }), zero);
    for (int i = 0; i < 32 * 4; ++i) {
      const int at = static_cast<int>(c_layout(i / 4, i % 4));
      found[at + first * m] = static_cast<int64_t>(d[i]);
    }
  }
  compare(name + "fragment a", found, places(a_layout, a_values));

  found.assign(n * k, -1);
  const auto d =
      multiply(of_a([](int row, int column) { return row == column ? 1.f : 0.f; }), numbered(b_values), zero);
  for (int i = 0; i < 32 * 4; ++i) {
    const int at = static_cast<int>(c_layout(i / 4, i % 4));
    if (at % m < k) found[at / m + at % m * n] = static_cast<int64_t>(d[i]);
  }
  compare(name + "fragment b", found, places(b_layout, b_values));

  const auto index = multiply(
      of_a([](int row, int column) {
        return column == 0 ? static_cast<float>(row) : column == 1 ? 1.f : 0.f;
      }),
      of_b([](int row, int column) { return row == 0   ? 1.f
                                            : row == 1 ? 16.f * column
                                                       : 0.f; }), zero);
  std::vector<int64_t> expected;
  for (int i = 0; i < 32 * 4; ++i) expected.push_back(c_layout(i / 4, i % 4));
  compare(name + "fragment c", as_table(index), expected);

  const auto random = [](int seed) { return [=](int i, int j) { return scrambled(seed, i, j); }; };
  const auto sums = multiply(of_a(random(1)), of_b(random(2)), random(3));
  for (int i = 0; i < 32 * 4; ++i) {
    const int row = static_cast<int>(expected[i]) % m, column = static_cast<int>(expected[i]) / m;
    float sum = scrambled(3, row, column);
    for (int j = 0; j < k; ++j) sum += scrambled(1, row, j) * scrambled(2, j, column);
    expected[i] = static_cast<int64_t>(sum);
  }
  compare(name + "product", as_table(sums), expected);
}

// CuTe numbers the 16-bit elements of all matrices by the lane that gives the address of their row.
template <class Operation, int count>
void compare_ldmatrix(bool transposed) {
  using Traits = cute::Copy_Traits<Operation>;
  const typename Traits::SrcLayout source{};
  const typename Traits::DstLayout target{};
  // The rows lie in shared memory in another order than in the matrices, and every element differs.
  std::vector<uint16_t> image(64 * 8);
  std::vector<int> row(32);
  for (size_t i = 0; i < image.size(); ++i) image[i] = static_cast<uint16_t>(i * 77 + 5);
  for (int lane = 0; lane < 32; ++lane) row[lane] = (lane * 23 + 11) % 64 * 8;
  std::vector<int64_t> by_number(count * 64, -1), found, expected;
  for (int lane = 0; lane < 8 * count; ++lane) {
    for (int i = 0; i < 8; ++i) by_number[source(lane, i * 16) / 16] = image[row[lane] + i];
  }
  const std::vector<uint32_t> loaded = run_ldmatrix(count, transposed, image, row);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 2 * count; ++i) {
      found.push_back(loaded[lane * count + i / 2] >> i % 2 * 16 & 0xffff);
      expected.push_back(by_number[target(lane, i * 16) / 16]);
    }
  }
  compare("ldmatrix x" + std::to_string(count) + (transposed ? " trans" : ""), found, expected);
}

}  // namespace

void compare_warp_matrices() {
  compare_mma<cute::SM80_16x8x16_F32BF16BF16F32_TN, 16>(Type::bf16);
  compare_mma<cute::SM80_16x8x16_F32F16F16F32_TN, 16>(Type::fp16);
  compare_mma<cute::SM80_16x8x8_F32TF32TF32F32_TN, 8>(Type::tf32);
  compare_ldmatrix<cute::SM75_U32x1_LDSM_N, 1>(false);
  compare_ldmatrix<cute::SM75_U32x2_LDSM_N, 2>(false);
  compare_ldmatrix<cute::SM75_U32x4_LDSM_N, 4>(false);
  compare_ldmatrix<cute::SM75_U16x2_LDSM_T, 1>(true);
  compare_ldmatrix<cute::SM75_U16x4_LDSM_T, 2>(true);
  compare_ldmatrix<cute::SM75_U16x8_LDSM_T, 4>(true);
}

}  // namespace twins
