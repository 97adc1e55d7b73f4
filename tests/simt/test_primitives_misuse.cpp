// Tests that the emulator reports each mistake in the use of cuda/core/ptx.h.

#include <cstdint>
#include <vector>

#include "catch2.h"
#include "check_caught.h"
#include "device_array.h"
#include "kernels/primitives.h"

using namespace simt_tests;

TEST_CASE("the emulator catches wrong use of the primitives") {
  DeviceArray<uint16_t> a(std::vector<uint16_t>(64 * 128)), b(std::vector<uint16_t>(64 * 128));
  DeviceArray<float> c(std::vector<float>(64 * 64)), in(std::vector<float>(7 * 64));
  const auto product = [&](Flaw flaw) {
    return gemm({Type::fp16, false, a.data(), b.data(), c.data(), 64, 64, 128}, flaw);
  };
  check_caught(Flaw::no_wait, "a cp.async is still under way", product);
  check_caught(Flaw::wait_off_by_one, "a cp.async is still under way", product);
  // The emulator may report uninitialised memory, a copy in flight, or a race; all these errors mention
  // shared memory.
  check_caught(Flaw::no_barrier_after_wait, "shared memory", product);
  check_caught(Flaw::no_barrier_before_copy, "race in shared memory", product);
  check_caught(Flaw::misaligned_row, "misaligned: read of 16 bytes", product);

  DeviceArray<unsigned char> bytes(std::vector<unsigned char>(128 * 16)),
      copied(std::vector<unsigned char>(128 * 16));
  DeviceArray<int> from_bytes(std::vector<int>(128, 16));
  const auto copy = [&](Flaw flaw) {
    return copy_async(16, bytes.data(), from_bytes.data(), copied.data(), flaw);
  };
  check_caught(Flaw::no_wait_at_all, "returns while its cp.async are under way", copy);
  check_caught(Flaw::too_many_bytes, "expected from_bytes from 0 to 16, received 17", copy);
  check_caught(Flaw::to_global_memory, "cp.async writes to shared memory only", copy);

  DeviceArray<unsigned> loaded(std::vector<unsigned>(4 * 32));
  const auto load = [&](Flaw flaw) { return matrices(4, false, a.data(), loaded.data(), flaw); };
  check_caught(Flaw::no_syncwarp, "race in shared memory: read of 2 bytes", load);
  check_caught(Flaw::row_in_global_memory, "ldmatrix reads shared memory only", load);

  const auto mma = [&](Flaw flaw) { return one_mma(Type::fp16, a.data(), b.data(), c.data(), flaw); };
  check_caught(Flaw::missing_lane, "lane 3 of the mask has returned", mma);
  check_caught(Flaw::two_places, "expected one instruction for the whole warp", mma);

  const auto pass_on = [&](Flaw flaw) { return ring(in.data(), 7, c.data(), flaw); };
  check_caught(Flaw::count_too_small, "race in shared memory", pass_on);
  check_caught(Flaw::unequal_counts, "threads, this one", pass_on);
  check_caught(Flaw::half_a_warp, "barrier_arrive", pass_on);
  check_caught(Flaw::arrive_too_soon, "race in shared memory", pass_on);
  check_caught(Flaw::arrive_twice, "has arrived at barrier", pass_on);
  check_caught(Flaw::no_arrive, "wait for others that never come", pass_on);
}
