// Emulates wgmma, the asynchronous matrix product of a warpgroup. The result is computed when the instruction
// is issued, and is written to the registers at wgmma_wait. In between, no thread may access these registers
// or write to operands in shared memory. Reads of operands in shared memory are recorded for lane 0 of a warp
// only.

#include <cstring>
#include <deque>

#include "internal.h"  // included first, since CUDA's names are macros
#include "ptx_emulation.h"
#include "simt_hopper.h"

namespace simt {
namespace {

struct Read {
  const unsigned char* address;
  size_t size;
  uint64_t begun;
};

struct Operation {
  Wgmma wgmma;
  std::vector<float> result;  // the n / 2 elements of the result that this thread will receive
  std::vector<Read> reads;    // reads of operands in shared memory; empty except in lane 0 of each warp
  int group;                  // number of the commit group; -1 if not committed yet
};

struct Own {
  std::deque<Operation> operations;
  int groups = 0;
  bool fenced = false;
  int registers = 0;  // registers per thread that setmaxnreg set; 0 means the number at the launch
};
std::vector<Own> own(kMaxThreads);

// The wgmma instructions that each warpgroup has issued. The four warps of a warpgroup have to issue the same
// ones.
struct Issued {
  uint64_t a_at, b_at;
  int n;
  bool from_registers, b_is_kn;
  unsigned line;
  bool operator==(const Issued&) const = default;
};
std::vector<Issued> issued[kMaxThreads / 128];
size_t issued_by[kMaxThreads / 32];

uintptr_t shared_base() { return reinterpret_cast<uintptr_t>(block.dynamic) / 1024 * 1024; }

// Returns the address of element (row, k) of an operand. If rows_together, the operand is stored as (k, row)
// with contiguous rows, otherwise as (row, k). Both layouts have a swizzle of 128 bytes.
const unsigned char* element_at(uint64_t descriptor, bool rows_together, int row, int k) {
  const auto field = [&](int bit) { return static_cast<uintptr_t>(descriptor >> bit & 0x3fff) * 16; };
  const uintptr_t leading = field(16), stride = field(32);
  uintptr_t at = shared_base() + field(0);
  at += rows_together ? row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                      : row / 8 * stride + row % 8 * 128 + k * 2;
  return reinterpret_cast<const unsigned char*>(at ^ (at >> 7 & 7) << 4);
}

void check_descriptor(uint64_t descriptor, bool rows_together, const char* which) {
  const uintptr_t start = (descriptor & 0x3fff) * 16;
  if (descriptor >> 62 != 1)
    fail(std::string("wgmma: ") + which + ": expected a descriptor with a swizzle of 128 bytes");
  if (start % 1024 >= (rows_together ? 16u : 128u)) {
    fail(std::string("wgmma: ") + which +
         ": expected a tile that begins at a multiple of 1024 bytes, received " + std::to_string(start));
  }
}

float value_of(const unsigned char* at, bool half) {
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return half ? __half2float(__ushort_as_half(bits)) : __bfloat162float(__ushort_as_bfloat16(bits));
}

struct Lane {
  Wgmma wgmma;
  const float* before;
  unsigned line;
};

float product_a[16][16], product_b[256][16];

// Computes one lane's part of the result. The first lane of the warp reads the operands for all lanes.
void multiply(const void* const in[32], unsigned, int lane, void* out) {
  const auto* const* lanes = reinterpret_cast<const Lane* const*>(in);
  const Lane &mine = *lanes[lane], &first = *lanes[0];
  const Wgmma& w = mine.wgmma;
  if (mine.line != first.line || w.a_at != first.wgmma.a_at || w.b_at != first.wgmma.b_at) {
    failf(
        "wgmma: lane %d is at line %u, lane 0 at line %u; expected one instruction and the same operands for "
        "the whole warp",
        lane, mine.line, first.line);
  }
  if (lane == 0) {
    const int warp = current->id / 32 % 4;
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < 16; ++row) {
        if (w.a == nullptr) {
          product_a[row][k] = value_of(element_at(w.a_at, false, warp * 16 + row, k), w.half);
        } else {
          const uint32_t pair = lanes[row % 8 * 4 + k % 8 / 2]->wgmma.a[row / 8 + k / 8 * 2];
          product_a[row][k] =
              w.half ? Element16<__half>::value(pair, k % 2) : Element16<__nv_bfloat16>::value(pair, k % 2);
        }
      }
      for (int row = 0; row < w.n; ++row)
        product_b[row][k] = value_of(element_at(w.b_at, w.b_is_kn, row, k), w.half);
    }
  }
  auto* result = static_cast<float*>(out);
  for (int e = 0; e < w.n / 2; ++e) {
    const float *a = product_a[lane / 4 + e / 2 % 2 * 8], *b = product_b[e / 4 * 8 + lane % 4 * 2 + e % 2];
    double sum = w.accumulate ? mine.before[e] : 0;
    for (int k = 0; k < 16; ++k) sum += static_cast<double>(a[k]) * b[k];
    result[e] = cut_off(sum);
  }
}

void nothing(const void* const[32], unsigned, int, void*) {}

void set_busy() {
  current->busy.clear();
  for (const Operation& o : own[current->id].operations) {
    const auto d = reinterpret_cast<uintptr_t>(o.wgmma.d), a = reinterpret_cast<uintptr_t>(o.wgmma.a);
    current->busy.push_back({d, d + o.wgmma.n / 2 * sizeof(float), false});
    if (a != 0) current->busy.push_back({a, a + 16, true});
  }
}

}  // namespace

void begin_wgmma() {
  for (Own& o : own) o = Own{};
  for (auto& i : issued) i.clear();
  for (auto& i : issued_by) i = 0;
}

uint64_t shared_offset(const void* p, Where) {
  if (!is_shared(p, 1) || reinterpret_cast<uintptr_t>(p) - shared_base() >= 256 << 10) {
    fail("wgmma: the operand is not in dynamic shared memory");
  }
  return reinterpret_cast<uintptr_t>(p) - shared_base();
}

void wgmma_fence(Where where) {
  warp_collective("wgmma_fence", 0xffffffff, nullptr, nullptr, nothing, false, where);
  own[current->id].fenced = true;
}

void wgmma(const Wgmma& w, Where where) {
  Own& mine = own[current->id];
  const std::string here = " (" + text_of(where) + ")";
  if (!mine.fenced) fail("wgmma" + here + ": no wgmma_fence() since the last group, for the registers");
  check_descriptor(w.b_at, w.b_is_kn, "b");
  if (w.a == nullptr) check_descriptor(w.a_at, false, "a");
  const float* before = w.d;
  for (const Operation& o : mine.operations) {
    if (o.wgmma.d == w.d && o.wgmma.n == w.n) before = o.result.data();
  }
  Operation next{w, std::vector<float>(w.n / 2), {}, -1};
  const Lane lane{w, before, where.line()};
  warp_collective("wgmma", 0xffffffff, &lane, next.result.data(), multiply, false, where);

  const int warp = current->id / 32;
  if (current->id % 32 == 0) {
    auto& log = issued[warp / 4];
    const Issued now{w.a_at, w.b_at, w.n, w.a != nullptr, w.b_is_kn, where.line()};
    if (issued_by[warp] == log.size()) log.push_back(now);
    if (!(log[issued_by[warp]++] == now))
      fail("wgmma" + here + ": another warp of the warpgroup issued another one");
    const auto read = [&](const unsigned char* address, size_t size) {
      next.reads.push_back({address, size, begin_read(address, size, {nullptr, where})});
    };
    // Operands are read in pieces of 16 contiguous bytes: eight elements along k, or along the rows if the
    // operand is stored as (k, row).
    for (int row = 0; row < 16 && w.a == nullptr; ++row) {
      for (int k = 0; k < 16; k += 8) read(element_at(w.a_at, false, warp % 4 * 16 + row, k), 16);
    }
    for (int row = 0; row < w.n; row += w.b_is_kn ? 8 : 1) {
      for (int k = 0; k < 16; k += w.b_is_kn ? 1 : 8) read(element_at(w.b_at, w.b_is_kn, row, k), 16);
    }
  }
  std::memset(static_cast<void*>(w.d), 0xff, w.n / 2 * sizeof(float));
  mine.operations.push_back(std::move(next));
  set_busy();
}

void wgmma_commit(Where where) {
  warp_collective("wgmma_commit", 0xffffffff, nullptr, nullptr, nothing, false, where);
  Own& mine = own[current->id];
  mine.fenced = false;
  for (Operation& o : mine.operations) {
    if (o.group < 0) o.group = mine.groups;
  }
  ++mine.groups;
}

void wgmma_wait(int pending, Where where) {
  warp_collective("wgmma_wait", 0xffffffff, nullptr, nullptr, nothing, false, where);
  Own& mine = own[current->id];
  while (!mine.operations.empty()) {
    Operation& o = mine.operations.front();
    if (o.group < 0 || o.group >= mine.groups - pending) break;
    for (const Read& r : o.reads) {
      if (!end_read(r.address, r.size, r.begun)) {
        fail("wgmma_wait (" + text_of(where) +
             "): an operand in shared memory was written while the wgmma was under way");
      }
    }
    std::memcpy(o.wgmma.d, o.result.data(), o.result.size() * sizeof(float));
    mine.operations.pop_front();
    set_busy();
  }
}

void set_registers(int count, bool grow, Where where) {
  const std::string here = " (" + text_of(where) + ")";
  warp_collective(grow ? "registers_grow" : "registers_shrink", 0xffffffff, nullptr, nullptr, nothing, false,
                  where);
  if (count < 24 || count > 256 || count % 8 != 0) {
    fail("setmaxnreg" + here + ": expected a multiple of 8 from 24 to 256, received " +
         std::to_string(count));
  }
  const int at_launch = 65536 / block.threads / 8 * 8, before = own[current->id].registers;
  if (grow ? count < (before ? before : at_launch) : count > (before ? before : at_launch)) {
    fail("setmaxnreg" + here + ": a thread of " + std::to_string(before ? before : at_launch) +
         " registers cannot " + (grow ? "grow" : "shrink") + " to " + std::to_string(count));
  }
  own[current->id].registers = count;
}

const char* left_in_wgmma() {
  int all = 0;
  for (int t = 0; t < block.threads; ++t) {
    const int first = own[t / 128 * 128].registers;
    if (own[t].registers != first)
      return "setmaxnreg: not all warps of a warpgroup set the same number of registers";
    all += first != 0 ? first : 65536 / block.threads / 8 * 8;
  }
  if (all > 65536)
    return "setmaxnreg: the warpgroups want more than 65,536 registers together, so that some wait forever";
  for (int w = 0; w < block.threads / 32; ++w) {
    if (issued_by[w] != issued[w / 4].size())
      return "wgmma: not all warps of a warpgroup issued the same number of them";
  }
  return nullptr;
}

}  // namespace simt
