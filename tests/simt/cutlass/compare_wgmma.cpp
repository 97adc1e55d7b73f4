// wgmma against CuTe's traits and descriptors of this instruction.

#include "compare.h"
#include "cute.h"

namespace twins {
namespace {

namespace gmma = cute::SM90::GMMA;
using gmma::Major;

// CuTe's instruction for a type, n, and the place of a (S: shared memory, R: registers).
template <Type type, int n, bool a_in_registers, Major b>
struct Instruction;
#define TWINS_INSTRUCTION(N)                                             \
  template <Major b>                                                     \
  struct Instruction<Type::bf16, N, false, b> {                          \
    using operation = gmma::MMA_64x##N##x16_F32BF16BF16_SS<Major::K, b>; \
  };                                                                     \
  template <Major b>                                                     \
  struct Instruction<Type::bf16, N, true, b> {                           \
    using operation = gmma::MMA_64x##N##x16_F32BF16BF16_RS<Major::K, b>; \
  };                                                                     \
  template <Major b>                                                     \
  struct Instruction<Type::fp16, N, false, b> {                          \
    using operation = gmma::MMA_64x##N##x16_F32F16F16_SS<Major::K, b>;   \
  };                                                                     \
  template <Major b>                                                     \
  struct Instruction<Type::fp16, N, true, b> {                           \
    using operation = gmma::MMA_64x##N##x16_F32F16F16_RS<Major::K, b>;   \
  };
TWINS_INSTRUCTION(48)
TWINS_INSTRUCTION(64)
TWINS_INSTRUCTION(96)
TWINS_INSTRUCTION(128)
TWINS_INSTRUCTION(192)
TWINS_INSTRUCTION(256)
#undef TWINS_INSTRUCTION

template <Type type>
using Element = std::conditional_t<type == Type::bf16, cute::bfloat16_t, cute::half_t>;

// The layout in shared memory of `rows` rows of `columns` columns as the library writes them: swizzled panels
// of 64 columns, one after the other. For products over the columns, CuTe numbers the elements as (row,
// column); for products over the rows as (column, row), and `rows` and `columns` change places.
template <Type type, int rows, int columns>
auto tile_over_columns() {
  return cute::tile_to_shape(gmma::Layout_K_SW128_Atom<Element<type>>{},
                             cute::Shape<cute::Int<rows>, cute::Int<columns>>{});
}
template <Type type, int rows, int columns>
auto tile_over_rows() {
  return cute::tile_to_shape(gmma::Layout_MN_SW128_Atom<Element<type>>{},
                             cute::Shape<cute::Int<columns>, cute::Int<rows>>{},
                             cute::Step<cute::_2, cute::_1>{});
}

// CuTe's descriptor of the 16 columns (or rows) from `step` on, of a tile `at` bytes into shared memory.
template <Type type, Major major, class Layout>
uint64_t descriptor_of(Layout layout, uint64_t at, int step) {
  auto* address = reinterpret_cast<Element<type>*>(cute_shared + at);
  const auto tile = cute::make_tensor(cute::make_smem_ptr(address), layout);
  constexpr auto outer = cute::size<0>(Layout{});
  const auto part =
      cute::local_tile(tile, cute::make_shape(outer, cute::_16{}), cute::make_coord(0, step / 16));
  return gmma::make_gmma_desc<major>(part).desc_;
}

template <class Layout>
int place(Layout layout, int i, int j) {
  return static_cast<int>(cute::as_position_independent_swizzle_layout(layout)(i, j));
}

using Matrix = std::function<float(int, int)>;

// A product of one type and n. Operand a is 64 rows of 64 columns. Operand b is n rows of 64 columns, or 64
// rows of n columns. The matrices are written where CuTe's layouts put their elements.
template <Type type, int n, bool a_in_registers, bool b_is_kn>
struct Case {
  static constexpr Major b_major = b_is_kn ? Major::MN : Major::K;
  using Operation = typename Instruction<type, n, a_in_registers, b_major>::operation;
  using Traits = cute::MMA_Traits<Operation>;
  static_assert(std::is_same_v<typename Traits::Shape_MNK, cute::Shape<cute::_64, cute::Int<n>, cute::_16>>);
  static constexpr int a_bytes = 64 * 128, b_rows = b_is_kn ? 64 : n, b_columns = b_is_kn ? n : 64;
  static constexpr int b_bytes = b_rows * b_columns * 2, k = 64;

  static std::string name() {
    return std::string("wgmma m64n") + std::to_string(n) + "k16 " + name_of(type) +
           (a_in_registers ? " a in registers" : "") + (b_is_kn ? " b (k, n)" : " b (n, k)") + ": ";
  }
  static auto b_layout() {
    if constexpr (b_is_kn) {
      return tile_over_rows<type, b_rows, b_columns>();
    } else {
      return tile_over_columns<type, b_rows, b_columns>();
    }
  }
  // The registers or the tile of a hold a(row, column), the tile of b holds b(k, column).
  static Product product(int step, const Matrix& a, const Matrix& b, const Matrix& c) {
    Product p{type, n, a_in_registers, b_is_kn, std::vector<uint16_t>((a_bytes + b_bytes) / 2)};
    p.a_panel = a_bytes;
    p.b_at = a_bytes;
    p.b_panel = b_rows * 128;
    p.step = step;
    for (int row = 0; row < 64; ++row) {
      for (int i = 0; i < k; ++i)
        p.image[place(tile_over_columns<type, 64, k>(), row, i)] = bits_of(type, a(row, i));
    }
    for (int column = 0; column < n; ++column) {
      for (int i = 0; i < k; ++i)
        p.image[a_bytes / 2 + place(b_layout(), column, i)] = bits_of(type, b(i, column));
    }
    if constexpr (a_in_registers) {
      p.a = registers(type, typename Traits::ALayout{}, 128, 8, 64,
                      [&](int row, int column) { return a(row, step + column); });
    }
    const typename Traits::CLayout layout{};
    for (int i = 0; i < 128 * n / 2; ++i) {
      const int at = static_cast<int>(layout(i / (n / 2), i % (n / 2)));
      p.c.push_back(c(at % 64, at / 64));
    }
    return p;
  }
};

Matrix random_matrix(int seed) {
  return [seed](int i, int j) { return scrambled(seed, i, j); };
}
float zero(int, int) { return 0; }

// Compares the element of d that each register of each thread receives.
template <Type type, int n>
void compare_result() {
  using This = Case<type, n, false, false>;
  // The element (row, column) of d becomes row + 64 * column. Both factors are exact in 16 bits.
  const auto a = [](int row, int i) { return i == 0 ? static_cast<float>(row) : i == 1 ? 64.f : 0.f; };
  const auto b = [](int i, int column) { return i == 0 ? 1.f : i == 1 ? static_cast<float>(column) : 0.f; };
  Product p = This::product(0, a, b, zero);
  p.run();
  const typename This::Traits::CLayout layout{};
  std::vector<int64_t> expected;
  for (int i = 0; i < 128 * n / 2; ++i) expected.push_back(layout(i / (n / 2), i % (n / 2)));
  compare(This::name() + "fragment of the result", as_table(p.d), expected);
}

// Compares the element of a that each register holds: register v of thread t has the number 8 t + v, which
// takes two runs to read in numbers that are exact in 16 bits.
template <Type type>
void compare_a_registers() {
  using This = Case<type, 64, true, false>;
  const typename This::Traits::ALayout layout{};
  const typename This::Traits::CLayout result{};
  std::vector<int64_t> found(64 * 16), expected(64 * 16, -1);
  const auto identity = [](int i, int column) { return i == column ? 1.f : 0.f; };
  for (const int part : {1, 128}) {
    Product p = This::product(0, zero, identity, zero);
    for (int i = 0; i < 128 * 4; ++i) {
      const auto number = [&](int e) { return bits_of(type, static_cast<float>((2 * i + e) / part % 128)); };
      p.a[i] = number(0) | number(1) << 16;
    }
    p.run();
    for (int i = 0; i < 128 * 32; ++i) {
      const int at = static_cast<int>(result(i / 32, i % 32));
      if (at < 64 * 16) found[at] += part * static_cast<int64_t>(p.d[i]);
    }
  }
  for (int i = 0; i < 128 * 8; ++i) expected[static_cast<int>(layout(i / 8, i % 8))] = i;
  compare(This::name() + "fragment of a", found, expected);
}

// From which place in shared memory the twin takes each element of b, or of a, over all steps of k. The place
// is a number of up to 16 bits, which takes two runs to read.
template <Type type, int n, bool b_is_kn>
void compare_places(bool of_a) {
  using This = Case<type, n, false, b_is_kn>;
  const typename This::Traits::CLayout result{};
  const int outer = of_a ? 64 : n;
  std::vector<int64_t> found(outer * This::k), expected;
  for (int step = 0; step < This::k; step += 16) {
    const auto identity = [step](int i, int j) { return i == step + j || j == step + i ? 1.f : 0.f; };
    for (const int part : {1, 128}) {
      Product p = This::product(step, identity, identity, zero);
      const int begin = of_a ? 0 : This::a_bytes / 2, end = of_a ? This::a_bytes / 2 : p.image.size();
      for (int i = begin; i < end; ++i)
        p.image[i] = bits_of(type, static_cast<float>((i - begin) / part % 128));
      p.run();
      for (int i = 0; i < 128 * n / 2; ++i) {
        const int at = static_cast<int>(result(i / (n / 2), i % (n / 2))), row = at % 64, column = at / 64;
        const int along = of_a ? row : column, over = of_a ? column : row;
        if (over < 16) found[along * This::k + step + over] += part * static_cast<int64_t>(p.d[i]);
      }
    }
  }
  for (int i = 0; i < outer; ++i) {
    for (int j = 0; j < This::k; ++j) {
      expected.push_back(of_a ? place(tile_over_columns<type, 64, This::k>(), i, j)
                              : place(This::b_layout(), i, j));
    }
  }
  compare(This::name() + (of_a ? "places of a" : "places of b"), found, expected);
}

// Random matrices, added to a random result.
template <Type type, int n, bool a_in_registers, bool b_is_kn>
void compare_product() {
  using This = Case<type, n, a_in_registers, b_is_kn>;
  const Matrix a = random_matrix(1), b = random_matrix(2), c = random_matrix(3);
  const typename This::Traits::CLayout layout{};
  std::vector<int64_t> found, expected;
  for (int step = 0; step < This::k; step += 16) {
    Product p = This::product(step, a, b, c);
    p.run();
    for (int i = 0; i < 128 * n / 2; ++i) {
      const int at = static_cast<int>(layout(i / (n / 2), i % (n / 2))), row = at % 64, column = at / 64;
      float sum = c(row, column);
      for (int j = 0; j < 16; ++j) sum += a(row, step + j) * b(step + j, column);
      found.push_back(static_cast<int64_t>(p.d[i]));
      expected.push_back(static_cast<int64_t>(sum));
    }
  }
  compare(This::name() + "product", found, expected);
}

// The descriptors of every step through a tile of `rows` rows and `columns` columns, over its columns.
template <int rows, int columns>
void compare_descriptors_over_columns() {
  std::vector<int64_t> found, expected;
  for (int step = 0; step < columns; step += 16) {
    Product p{Type::fp16, 64, false, false};
    p.b_at = 2048;
    p.a_panel = p.b_panel = rows * 128;
    p.step = step;
    p.image.resize((p.b_at + 64 * 128) / 2 + rows * columns);
    p.c.resize(128 * 64 / 2);
    p.run();
    const auto layout = tile_over_columns<Type::fp16, rows, columns>();
    for (const uint64_t descriptor : {p.a_descriptor, p.b_descriptor})
      found.push_back(static_cast<int64_t>(descriptor));
    for (const int at : {0, p.b_at}) {
      expected.push_back(
          static_cast<int64_t>(descriptor_of<Type::fp16, Major::K>(layout, p.image_at + at, step)));
    }
  }
  compare("wgmma descriptors of steps over the columns of a tile (" + std::to_string(rows) + ", " +
              std::to_string(columns) + ")",
          found, expected);
}

// The same over the rows of a tile.
template <int rows, int columns>
void compare_descriptors_over_rows() {
  std::vector<int64_t> found, expected;
  for (int step = 0; step < rows; step += 16) {
    Product p{Type::bf16, columns, false, true};
    p.b_at = 64 * 128;
    p.b_panel = rows * 128;
    p.a_panel = 64 * 128;
    p.step = step;
    p.image.resize(p.b_at / 2 + rows * columns);
    p.c.resize(128 * columns / 2);
    p.run();
    const auto layout = tile_over_rows<Type::bf16, rows, columns>();
    // A panel of 64 columns is a whole operand of n = 64, so the distance to the next one has no meaning.
    const uint64_t used = columns == 64 ? ~(uint64_t{0x3fff} << 16) : ~uint64_t{0};
    found.push_back(static_cast<int64_t>(p.b_descriptor & used));
    expected.push_back(
        static_cast<int64_t>(descriptor_of<Type::bf16, Major::MN>(layout, p.image_at + p.b_at, step) & used));
  }
  compare("wgmma descriptors of steps over the rows of a tile (" + std::to_string(rows) + ", " +
              std::to_string(columns) + ")",
          found, expected);
}

template <Type type, int n>
void compare_n() {
  compare_result<type, n>();
  compare_places<type, n, false>(false);
  compare_product<type, n, false, false>();
  compare_product<type, n, true, false>();
  // If b is (k, n), CuTe has layouts only for an n that is a multiple of 64, the width of a panel.
  if constexpr (n % 64 == 0) {
    compare_places<type, n, true>(false);
    compare_product<type, n, false, true>();
    compare_product<type, n, true, true>();
  }
}

template <Type type>
void compare_type() {
  compare_a_registers<type>();
  compare_places<type, 64, false>(true);
  compare_n<type, 48>();
  compare_n<type, 64>();
  compare_n<type, 96>();
  compare_n<type, 128>();
  compare_n<type, 192>();
  compare_n<type, 256>();
}

}  // namespace

void compare_wgmma() {
  compare_type<Type::bf16>();
  compare_type<Type::fp16>();
  // The tiles of the attention kernels: up to 256 features, 48 to 128 rows.
  compare_descriptors_over_columns<48, 256>();
  compare_descriptors_over_columns<64, 64>();
  compare_descriptors_over_columns<64, 128>();
  compare_descriptors_over_columns<64, 192>();
  compare_descriptors_over_columns<64, 256>();
  compare_descriptors_over_columns<96, 64>();
  compare_descriptors_over_columns<128, 64>();
  compare_descriptors_over_columns<128, 128>();
  compare_descriptors_over_rows<48, 128>();
  compare_descriptors_over_rows<48, 256>();
  compare_descriptors_over_rows<64, 64>();
  compare_descriptors_over_rows<64, 128>();
  compare_descriptors_over_rows<64, 192>();
  compare_descriptors_over_rows<64, 256>();
  compare_descriptors_over_rows<96, 64>();
  compare_descriptors_over_rows<128, 64>();
  compare_descriptors_over_rows<128, 128>();
}

}  // namespace twins
