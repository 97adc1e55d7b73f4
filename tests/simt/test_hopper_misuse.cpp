// Tests that the emulator reports each mistake in the use of cuda/core/hopper.h and wgmma.h.

#include <cstdint>
#include <vector>

#include "catch2.h"
#include "check_caught.h"
#include "device_array.h"
#include "kernels/hopper.h"

using namespace simt_tests;

TEST_CASE("the emulator catches wrong use of mbarriers, tensor copies and wgmma") {
  DeviceArray<uint16_t> a(std::vector<uint16_t>(64 * 256)), b(std::vector<uint16_t>(64 * 256));
  DeviceArray<float> c(std::vector<float>(64 * 64));
  const auto tiles = [&](HopperFlaw flaw) {
    return tile_gemm({Type::fp16, false, false, 64, a.data(), b.data(), c.data(), 64, 64, 256}, flaw);
  };
  check_caught(HopperFlaw::no_full_wait, "a tensor copy is still under way", tiles);
  check_caught(HopperFlaw::no_empty_wait, "more arrivals than the barrier's 1", tiles);
  check_caught(HopperFlaw::released_before_wait, "race in shared memory", tiles);
  check_caught(HopperFlaw::too_many_bytes, "lacks 0 of 1 arrivals and 16 bytes", tiles);
  check_caught(HopperFlaw::too_few_bytes, "and the barrier's phase expects 16368", tiles);
  check_caught(HopperFlaw::bytes_after_copy, "call mbarrier_arrive_expect first", tiles);
  check_caught(HopperFlaw::wrong_parity, "a tensor copy is still under way", tiles);
  check_caught(HopperFlaw::no_init_fence, "no mbarrier_init_fence()", tiles);
  // The emulator may report a missing initialisation or a race, so only the file name is expected in the
  // error.
  check_caught(HopperFlaw::no_barrier_after_init, "tests/simt/kernels/hopper.cu", tiles);
  check_caught(HopperFlaw::no_wgmma_fence, "no wgmma_fence()", tiles);
  check_caught(HopperFlaw::no_commit, "race in shared memory", tiles);
  check_caught(HopperFlaw::touched_accumulators, "a wgmma is still under way with this register", tiles);
  check_caught(HopperFlaw::half_a_warpgroup, "wait for others that never come", tiles);
  check_caught(HopperFlaw::two_operands, "another warp of the warpgroup issued another one", tiles);
  check_caught(HopperFlaw::unaligned_tile, "the swizzle repeats every 1024 bytes", tiles);
  check_caught(HopperFlaw::one_coordinate_less, "expected 4 coordinates, received 3", tiles);
  check_caught(HopperFlaw::too_many_registers, "more than 65,536 registers", tiles);
  check_caught(HopperFlaw::no_wait_at_all, "returns while its wgmma are under way", tiles);

  const auto written = [&](HopperFlaw flaw) { return written_gemm(a.data(), b.data(), c.data(), flaw); };
  check_caught(HopperFlaw::no_async_fence, "not fenced: read of 16 bytes", written);
  check_caught(HopperFlaw::no_barrier_after_write, "shared memory", written);
  check_caught(HopperFlaw::written_under_way, "race in shared memory: write to 2 bytes", written);
  check_caught(HopperFlaw::a_under_way, "a wgmma is still under way with this register", written);

  DeviceArray<uint16_t> in(std::vector<uint16_t>(3 * 5 * 72)), out(std::vector<uint16_t>(2 * 4 * 64));
  check_caught(HopperFlaw::waits_for_own_warp, "waits for the arrival of lane 0 of its own warp",
               [&](HopperFlaw flaw) { return box(in.data(), 0, 0, 0, out.data(), flaw); });
}
