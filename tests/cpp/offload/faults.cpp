// Defines the operator shoestring_tests::disturb_offload, which the Python tests load. It delays copies,
// reads and writes of offloaded memory, or makes them fail (csrc/offload/disturb.h).

#include <torch/library.h>

#include "offload/disturb.h"

TORCH_LIBRARY(shoestring_tests, m) {
  m.def(R"(disturb_offload(int max_delay_us=0, int fail_after=-1, int error=0, bool short_transfers=False,
      bool reserves=True) -> ())",
        [](int64_t max_delay_us, int64_t fail_after, int64_t error, bool short_transfers, bool reserves) {
          shoestring::offload::io::disturb(
              {max_delay_us, fail_after, static_cast<int>(error), short_transfers, reserves});
        });
}
