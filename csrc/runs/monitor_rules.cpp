// Names the bottlenecks of a run. Each rule is a pure function of the whole time as one sample.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>

#include "runs/monitor_fields.h"
#include "runs/monitor_text.h"

namespace shoestring {
namespace runs {
namespace {

// A finding must concern at least this share of the time.
constexpr double kLeastShare = 0.1;
// Shorter runs have no findings, since their counters are too coarse.
constexpr double kLeastSeconds = 0.3;

struct Facts {
  const MonitorMachine& machine;
  const MonitorSample& total;

  double per_second(double sum) const { return sum / total.seconds; }
  double share(double seconds) const { return std::clamp(seconds / total.seconds, 0.0, 1.0); }
  double cores() const { return per_second(total.cpu_seconds); }
  double other_cores() const {
    return std::max(0.0, per_second(total.machine_cpu_seconds - total.cpu_seconds));
  }
  double idle_cores() const {
    return std::max(0.0, machine.cores - std::max(per_second(total.machine_cpu_seconds), cores()));
  }
  double loop_seconds() const { return total.wait_seconds + total.step_seconds; }
  double starved() const {
    return loop_seconds() > 0 ? std::min(1.0, total.starved_seconds / loop_seconds()) : 0;
  }
  bool uses_gpu() const {
    return std::any_of(total.gpus.begin(), total.gpus.end(), [](const auto& gpu) { return gpu.is_used > 0; });
  }
};

using Found = std::optional<MonitorFinding>;

Found data_rule(const Facts& f) {
  if (f.total.steps < 2 || f.starved() < kLeastShare) return {};
  std::string evidence = percent(f.starved()) + " of the loop waits for the next batch (" +
                         number(1e3 * f.total.starved_seconds / f.total.steps) + " ms per step)";
  const int64_t workers = f.machine.workers;
  if (workers >= 0) evidence += "; the loader has " + count(workers, "worker process", "worker processes");
  std::string cure;
  if (f.idle_cores() < 0.3 && f.machine.cores > 1) {
    cure = "All cores are busy: make the preparation of a batch cheaper, or store prepared data in a file.";
  } else if (workers > 0) {
    cure = "Raise num_workers of the DataLoader to " +
           std::to_string(workers + std::lround(f.idle_cores()) + 1) +
           ", or make the preparation of a batch cheaper.";
  } else {
    cure = "Read ahead: set num_workers of the DataLoader, or use shoestring.data.Prefetcher.";
  }
  return MonitorFinding{"data", f.starved(), evidence, cure};
}

Found memory_rule(const Facts& f) {
  if (f.machine.memory <= 0) return {};
  const double used_share = f.total.machine_memory_peak / f.machine.memory;
  const double swapped = f.per_second(f.total.swapped_bytes);
  const bool swaps = swapped > 1e6;
  if (!swaps && used_share < 0.95) return {};
  std::string evidence = "RAM peak " + gibibytes(f.total.machine_memory_peak) + " of " +
                         gibibytes(f.machine.memory) + " GiB, of which " + gibibytes(f.total.memory_peak) +
                         " GiB by this run";
  if (swaps) evidence += "; swapping " + number(swapped / 1e6) + " MB/s";
  const double share =
      std::max({used_share >= 0.95 ? used_share : 0, f.share(f.total.memory_stall_seconds), swaps ? 0.5 : 0});
  const bool is_this_run = f.total.memory_peak > f.total.machine_memory_peak / 2;
  return MonitorFinding{
      "memory", std::min(1.0, share), evidence,
      is_this_run ? "Take a smaller batch, recompute activations (shoestring.checkpoint), or use fewer "
                    "worker processes."
                  : "End other processes: they use most of the memory."};
}

Found disk_rule(const Facts& f) {
  const double busy = f.share(f.total.disk_seconds);
  const double moved = f.per_second(f.total.read_bytes + f.total.written_bytes);
  if (busy < 0.6 || moved < 1e6) return {};
  // A disk that is busy beside the computation costs nothing.
  const double lost = f.total.steps >= 2 ? f.starved() : 1 - f.cores() / f.machine.cores;
  if (lost < kLeastShare) return {};
  std::string evidence = "disk " + (f.machine.disk.empty() ? "" : f.machine.disk + " ") + "is busy " +
                         percent(busy) + " of the time; this run reads " +
                         number(f.per_second(f.total.read_bytes) / 1e6) + " and writes " +
                         number(f.per_second(f.total.written_bytes) / 1e6) + " MB/s";
  if (f.total.major_faults > f.total.seconds)
    evidence += ", with " + number(f.per_second(f.total.major_faults)) + " page faults a second";
  return MonitorFinding{
      "disk", std::min(busy, lost), evidence,
      "Read data in its order, store it compressed or in a faster place, or keep it in memory."};
}

Found thread_rule(const Facts& f) {
  // One thread is busy all the time, it does nearly all the work, and another core is free.
  if (f.machine.cores < 2 || f.idle_cores() < 0.4 || f.uses_gpu()) return {};
  if (f.cores() < 0.8 || f.cores() > 1.25 || f.total.thread_seconds < 0.8 * f.total.cpu_seconds) return {};
  if (f.starved() >= 0.5) return {};  // the data finding covers the thread that prepares batches
  return MonitorFinding{
      "cpu", 1 - 1 / f.machine.cores,
      number(f.cores()) + " of " + number(f.machine.cores) + " cores are busy: the work runs in one thread",
      "Check torch.get_num_threads() and OMP_NUM_THREADS, and replace Python loops over elements "
      "by operations on whole tensors."};
}

Found others_rule(const Facts& f) {
  const double cores_of_others = f.other_cores();
  if (f.idle_cores() > 0.1 * f.machine.cores || cores_of_others < 0.25 * f.machine.cores) return {};
  // Inside of a quota, other processes of the machine do not take this run's cores.
  if (f.per_second(f.total.machine_cpu_seconds) > 1.1 * f.machine.cores) return {};
  return MonitorFinding{"cpu", std::min(1.0, cores_of_others / f.machine.cores),
                        "other processes use " + number(cores_of_others) + " of " + number(f.machine.cores) +
                            " cores, and no core is free",
                        "End other processes, or run this one alone."};
}

void gpu_rules(const Facts& f, std::vector<MonitorFinding>& findings) {
  for (size_t i = 0; i < f.total.gpus.size(); ++i) {
    const MonitorGpu& gpu = f.total.gpus[i];
    if (gpu.is_used == 0) continue;
    const std::string name = "GPU " + std::to_string(i);
    const double idle = 1 - f.share(gpu.busy_seconds);
    // Waiting for data has a finding of its own.
    if (idle - f.starved() >= 0.3) {
      findings.push_back({"gpu", idle, name + " is idle " + percent(idle) + " of the time",
                          "Look for waits of the host (.item(), .cpu(), print), take larger batches, use "
                          "torch.compile or CUDA graphs."});
    }
    const double hot = f.share(gpu.hot_seconds), limited = f.share(gpu.power_limited_seconds);
    if (hot >= kLeastShare) {
      findings.push_back({"gpu", hot, name + " lowers its clocks for heat " + percent(hot) + " of the time",
                          "Improve the cooling."});
    }
    if (limited >= 0.5) {
      findings.push_back(
          {"gpu", kLeastShare,
           name + " is at the limit of its power " + percent(limited) + " of the time (" +
               number(f.per_second(gpu.energy)) + " W)",
           "Raise the limit with nvidia-smi -pl if the cooling allows it; otherwise nothing is wrong."});
    }
    const double memory = i < f.machine.gpu_memory.size() ? f.machine.gpu_memory[i] : 0;
    if (memory > 0 && gpu.memory_peak >= 0.97 * memory) {
      findings.push_back(
          {"gpu", kLeastShare,
           name + " memory peak " + gibibytes(gpu.memory_peak) + " of " + gibibytes(memory) + " GiB",
           "Leave some room, since the allocator frees and retries at the limit: take a smaller batch."});
    }
  }
}

}  // namespace

void append(MonitorSample& sample, const MonitorSample& next) {
  const auto add = [](double& value, double other, Merge merge) {
    value = merge == Merge::kSum ? value + other : merge == Merge::kPeak ? std::max(value, other) : other;
  };
  visit_sample_fields(
      [&](const char*, auto member, Merge merge) { add(sample.*member, next.*member, merge); });
  sample.gpus.resize(std::max(sample.gpus.size(), next.gpus.size()));
  for (size_t i = 0; i < next.gpus.size(); ++i) {
    visit_gpu_fields([&](const char*, auto member, Merge merge) {
      add(sample.gpus[i].*member, next.gpus[i].*member, merge);
    });
  }
}

}  // namespace runs

MonitorReport monitor_report(MonitorMachine machine, std::vector<MonitorSample> samples) {
  MonitorReport report;
  for (const auto& sample : samples) runs::append(report.total, sample);
  report.machine = std::move(machine);
  report.samples = std::move(samples);
  if (report.total.seconds < runs::kLeastSeconds) return report;
  const runs::Facts facts{report.machine, report.total};
  for (const auto rule :
       {runs::data_rule, runs::memory_rule, runs::disk_rule, runs::thread_rule, runs::others_rule}) {
    if (const auto finding = rule(facts)) report.findings.push_back(*finding);
  }
  runs::gpu_rules(facts, report.findings);
  std::stable_sort(report.findings.begin(), report.findings.end(),
                   [](const auto& a, const auto& b) { return a.share > b.share; });
  return report;
}

}  // namespace shoestring
