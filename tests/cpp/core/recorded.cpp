// A library that records which operators of shoestring run in a process, for the first tier of the Python
// tests.
#include <ATen/record_function.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

std::mutex mutex;
std::set<std::string> recorded;

std::unique_ptr<at::ObserverContext> record(const at::RecordFunction& function) {
  std::string name = function.name();
  if (name.rfind("shoestring::", 0) == 0) {
    std::lock_guard lock(mutex);
    recorded.insert(std::move(name));
  }
  return nullptr;
}

std::vector<std::string> names() {
  std::lock_guard lock(mutex);
  return {recorded.begin(), recorded.end()};
}

const auto callback =
    at::addGlobalCallback(at::RecordFunctionCallback(record).scopes({at::RecordScope::FUNCTION}));

}  // namespace

TORCH_LIBRARY(recorded_operators, m) { m.def("names() -> str[]", names); }
