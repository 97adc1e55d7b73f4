// Connects processes, and waits for collectives.

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <memory>

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <shoestring/distributed/distributed.h>

#include "core/cuda.h"
#include "distributed/backends.h"
#include "distributed/named_backend.h"

namespace shoestring::distributed {
namespace {

using c10d::ProcessGroup;

constexpr const char* kInit = "init_process_group";

std::string text_of(const char* variable) {
  const char* text = std::getenv(variable);
  TORCH_CHECK(text != nullptr && *text != '\0', kInit, ": ", variable,
              ": expected the environment variable that torchrun sets, received none. Start the program with "
              "torchrun, or pass the option.");
  return text;
}

int64_t number_of(const std::optional<int64_t>& option, const char* variable, int64_t least, int64_t most) {
  const std::string text = option.has_value() ? std::to_string(*option) : text_of(variable);
  int64_t value = 0;
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK_VALUE(
      parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && value >= least && value <= most,
      kInit, ": ", variable, ": expected a number from ", least, " to ", most, ", received ", text);
  return value;
}

std::string attempt() {
  const char* text = std::getenv("TORCHELASTIC_RESTART_COUNT");
  return text == nullptr ? "0" : text;
}

// Gloo writes to the socket of a rank that has ended. Without this the signal would end the process, without
// a word.
void ignore_broken_pipes() {
  struct sigaction now{};
  if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL) std::signal(SIGPIPE, SIG_IGN);
}

// Returns the functions of NCCL. Raises an error in a program that cannot use NCCL.
const Nccl& nccl() {
  const auto* table = static_cast<const Nccl*>(cuda::find_provided("nccl", typeid(Nccl)));
  TORCH_CHECK(table != nullptr, kInit,
              ": backend: expected a program that links shoestring::shoestring of a ",
              "build with CUDA kernels and nccl.h for \"nccl\", received one without. Use \"gloo\", or ",
              "build where both are.");
  TORCH_CHECK(table->gpus() > 0, kInit,
              ": backend: expected a GPU for \"nccl\", received none. Use \"gloo\".");
  return *table;
}

// Returns a group over Gloo or NCCL. `caller` begins errors.
GroupPtr connect(const char* caller, ProcessGroup::BackendType type,
                 const c10::intrusive_ptr<c10d::Store>& store, int64_t rank, int64_t size,
                 std::chrono::milliseconds timeout, const std::string& name) {
  const int int_rank = static_cast<int>(rank), int_size = static_cast<int>(size);
  const bool on_gpus = type == ProcessGroup::BackendType::NCCL;
  auto group = c10::make_intrusive<ProcessGroup>(store, int_rank, int_size);
  const auto listener = std::make_shared<Listener>(*store, rank, size);
  try {
    const auto prefix = c10::make_intrusive<c10d::PrefixStore>(on_gpus ? "nccl" : "gloo", store);
    auto backend = (on_gpus ? nccl().make : make_gloo)(prefix, int_rank, int_size, timeout);
    group->setBackend(on_gpus ? c10::DeviceType::CUDA : c10::DeviceType::CPU, type,
                      c10::make_intrusive<NamedBackend>(std::move(backend), listener));
  } catch (const std::exception& error) {
    TORCH_CHECK(false, caller, ": rank ", rank, " of ", size, ": expected all ranks within ", timeout.count(),
                " ms, received ", first_line(error), listener->verdict());
  }
  group->setDefaultBackend(type);
  group->setGroupName(name);
  return group;
}

}  // namespace

GroupPtr init_process_group(const ProcessGroupOptions& options) {
  const bool on_gpus = options.backend() == "nccl";
  TORCH_CHECK_VALUE(on_gpus || options.backend() == "gloo", kInit,
                    ": backend: expected \"gloo\" or \"nccl\", received \"", options.backend(), "\"");
  if (on_gpus) nccl();
  TORCH_CHECK_VALUE(options.timeout().count() > 0, kInit, ": timeout: expected a time above 0, received ",
                    options.timeout().count(), " ms");
  const int64_t size = number_of(options.world_size(), "WORLD_SIZE", 1, INT32_MAX);
  const int64_t rank = number_of(options.rank(), "RANK", 0, size - 1);
  const std::string address = options.address().has_value() ? *options.address() : text_of("MASTER_ADDR");
  const int64_t port = number_of(options.port(), "MASTER_PORT", 1, 65535);
  ignore_broken_pipes();
  c10::intrusive_ptr<c10d::Store> store;
  try {
    c10d::TCPStoreOptions tcp;
    tcp.port = static_cast<uint16_t>(port);
    tcp.isServer = rank == 0 && !agent_has_store();
    tcp.numWorkers = static_cast<size_t>(size);
    tcp.waitWorkers = false;  // a late rank is waited for below, for as long as the timeout
    tcp.timeout = options.timeout();
    tcp.multiTenant = true;
    store = c10::make_intrusive<c10d::PrefixStore>("shoestring/" + attempt(),
                                                   c10::make_intrusive<c10d::TCPStore>(address, tcp));
    store->setTimeout(options.timeout());
  } catch (const std::exception& error) {
    TORCH_CHECK(false, kInit, ": rank ", rank, " of ", size, ": expected the store at ", address, ":", port,
                ", received ", first_line(error));
  }
  return connect(kInit, on_gpus ? ProcessGroup::BackendType::NCCL : ProcessGroup::BackendType::GLOO, store,
                 rank, size, options.timeout(), "shoestring");
}

GroupPtr new_group(const GroupPtr& group, const std::vector<int64_t>& ranks,
                   std::chrono::milliseconds timeout) {
  constexpr const char* kNew = "new_group";
  TORCH_CHECK_VALUE(group.defined() && group->getStore(), kNew, ": group: expected a group of ",
                    "init_process_group(), received ", group.defined() ? "one without a store" : "none");
  for (const int64_t rank : ranks)
    TORCH_CHECK_VALUE(
        rank >= 0 && rank < group->getSize() && std::count(ranks.begin(), ranks.end(), rank) == 1, kNew,
        ": ranks: expected different ranks of ", group->getSize(), ", received ", at::IntArrayRef(ranks));
  // All ranks make the same groups in the same order, also those that are in none.
  static CallsOfGroups calls;
  const std::string name = c10::str(group->getGroupName(), "/", calls.count(*group));
  const auto this_rank = std::find(ranks.begin(), ranks.end(), group->getRank());
  if (this_rank == ranks.end()) return {};
  const auto store = c10::make_intrusive<c10d::PrefixStore>(name, group->getStore());
  return connect(kNew, group->getBackendType(), store, this_rank - ranks.begin(), std::ssize(ranks), timeout,
                 name);
}

at::Device device_of(const ProcessGroup& group) {
  const std::vector<at::Device> devices = group.getDeviceTypes();
  const auto is_cpu = [](const at::Device& device) { return device.is_cpu(); };
  if (devices.empty() || std::any_of(devices.begin(), devices.end(), is_cpu)) return at::kCPU;
  return c10::impl::VirtualGuardImpl(devices[0].type()).getDevice();
}

std::vector<int64_t> survivors(const GroupPtr& group) {
  const auto listener = group.defined() ? listener_of(*group) : nullptr;
  TORCH_CHECK_VALUE(listener,
                    "survivors: group: expected a group of several processes of init_process_group(), ",
                    "new_group() or DiLoCo, received ", group.defined() ? "another one" : "none");
  return listener->survivors("survivors");
}

std::string registered_name(const GroupPtr& group) {
  static int64_t number = 0;
  const std::string name = group->hasBackends() ? group->getGroupName() : "";
  try {
    if (!name.empty() && c10d::resolve_process_group(name) == group) return name;
  } catch (const std::exception&) {  // no group has this name
  }
  const std::string new_name = c10::str("shoestring/", number++);
  c10d::register_process_group(new_name, group);
  return new_name;
}

void fail_collective(c10d::ProcessGroup& group, const std::exception& error, const std::string& what) {
  const std::string rank = c10::str("rank ", group.getRank(), " of ", group.getSize(), ": ");
  const std::string text = first_line(error);
  if (text.rfind(rank, 0) == 0)  // a NamedBackend has explained the error
    TORCH_CHECK_WITH(DistBackendError, false, rank, what, ": ", text.substr(rank.size()));
  const auto listener = listener_of(group);
  TORCH_CHECK_WITH(DistBackendError, false, rank, what, ": ", text, listener ? listener->verdict() : "");
}

void wait_for(const GroupPtr& group, const c10::intrusive_ptr<c10d::Work>& work, const std::string& what) {
  try {
    work->wait();
  } catch (const std::exception& error) {
    fail_collective(*group, error, what);
  }
}

at::Tensor mean_over_ranks(const GroupPtr& group, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_floating_point(), "mean_over_ranks: tensor: expected a floating-point dtype, ",
                    "received ", tensor.scalar_type());
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> sum{tensor.detach().to(device_of(*group)).clone(at::MemoryFormat::Contiguous)};
  wait_for(group, group->allreduce(sum), "mean_over_ranks");
  return sum[0].div_(group->getSize()).to(tensor.device());
}

}  // namespace shoestring::distributed
