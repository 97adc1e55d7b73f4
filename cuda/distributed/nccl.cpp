// Makes NCCL backends for init_process_group(). No other file includes the header of ProcessGroupNCCL, which
// needs nccl.h and the headers of CUDA.

#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "core/cuda_tables.h"
#include "distributed/backends.h"

namespace shoestring::distributed {
namespace {

const Nccl kNccl{[] { return static_cast<int>(c10::cuda::device_count()); },
                 [](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                    std::chrono::milliseconds timeout) -> c10::intrusive_ptr<c10d::Backend> {
                   const auto options = c10d::ProcessGroupNCCL::Options::create();
                   options->timeout = timeout;
                   return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
                 }};
const bool kProvided = (cuda::provide("nccl", &kNccl), true);

}  // namespace
}  // namespace shoestring::distributed
