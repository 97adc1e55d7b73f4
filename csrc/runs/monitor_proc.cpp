#include "runs/monitor_proc.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>

namespace shoestring::runs {
namespace {

// Returns the content of a file of /proc, or "" if it cannot be read.
std::string proc_content(const std::string& path) {
  std::string text;
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return text;
  char buffer[4096];
  for (;;) {
    const ssize_t size = ::read(file, buffer, sizeof buffer);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) break;
    text.append(buffer, static_cast<size_t>(size));
  }
  ::close(file);
  return text;
}

// Returns the number after `key`, which begins a line, or `missing`.
double proc_value(const std::string& text, const char* key, double missing = 0) {
  const size_t length = std::strlen(key);
  for (size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + 1)) {
    if (at == 0 || text[at - 1] == '\n') return std::strtod(text.c_str() + at + length, nullptr);
  }
  return missing;
}

// Calls visit(number) for the entries of a folder whose names are numbers.
template <class Visit>
void each_number(const std::string& path, const Visit& visit) {
  DIR* folder = ::opendir(path.c_str());
  if (folder == nullptr) return;
  while (const dirent* entry = ::readdir(folder)) {
    if (entry->d_name[0] >= '0' && entry->d_name[0] <= '9')
      visit(static_cast<pid_t>(std::atoi(entry->d_name)));
  }
  ::closedir(folder);
}

std::string of_process(pid_t pid, const char* name) { return "/proc/" + std::to_string(pid) + "/" + name; }

struct ProcStat {
  int parent = 0;
  double faults = 0, ticks = 0;  // including those of children that have ended
};

ProcStat proc_stat(pid_t pid) {
  const std::string text = proc_content(of_process(pid, "stat"));
  // The name of the program, in parentheses, may contain anything.
  const size_t name = text.rfind(')');
  if (name == std::string::npos) return {};
  int parent = 0;
  unsigned long faults = 0, child_faults = 0, user = 0, system = 0;
  long child_user = 0, child_system = 0;
  std::sscanf(text.c_str() + name + 1, " %*c %d %*d %*d %*d %*d %*u %*u %*u %lu %lu %lu %lu %ld %ld", &parent,
              &faults, &child_faults, &user, &system, &child_user, &child_system);
  return {parent, double(faults + child_faults), double(user + system + child_user + child_system)};
}

double clock_seconds(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

double ticks_per_second() {
  static const double ticks = double(::sysconf(_SC_CLK_TCK));
  return ticks;
}

double page_bytes() {
  static const double bytes = double(::sysconf(_SC_PAGESIZE));
  return bytes;
}

// Returns the path of a process within the hierarchy of a controller, or "" if there is none.
std::string cgroup_path(pid_t pid, const std::string& controller) {
  const std::string text = proc_content(of_process(pid, "cgroup")), listed = "," + controller + ",";
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    const std::string line = text.substr(at, end - at);
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second != std::string::npos) {
      std::string names = ",";
      names.append(line, first + 1, second - first - 1).append(",");
      if (names.find(listed) != std::string::npos) return line.substr(second + 1);
    }
    at = end + 1;
  }
  return "";
}

// Calls visit(folder) for the cgroup of a process and those above it. A container may see its own cgroup as
// the root.
template <class Visit>
void each_cgroup(const std::string& mount, std::string path, const Visit& visit) {
  while (!path.empty() && path != "/") {
    visit(mount + path);
    path.erase(path.rfind('/'));
  }
  visit(mount);
}

// Returns the number in a file, or -1 if there is none: a cgroup without a limit has "max", or no file.
double limit_of(const std::string& path) {
  const std::string text = proc_content(path);
  return text.empty() || text[0] < '0' || text[0] > '9' ? -1 : std::strtod(text.c_str(), nullptr);
}

}  // namespace

double Paced::wall_seconds() { return clock_seconds(CLOCK_MONOTONIC); }
double Paced::thread_seconds() { return clock_seconds(CLOCK_THREAD_CPUTIME_ID); }

ProcReader::ProcReader(pid_t root) : root_(root) {
  memory_ = 1024 * proc_value(proc_content("/proc/meminfo"), "MemTotal:");
  cpu_set_t set;
  CPU_ZERO(&set);
  cores_ = ::sched_getaffinity(root, sizeof set, &set) == 0 ? CPU_COUNT(&set)
                                                            : double(::sysconf(_SC_NPROCESSORS_ONLN));
  const auto lower_memory = [&](const std::string& folder, const char* name, bool v1) {
    const double limit = limit_of(folder + "/" + name);
    if (limit <= 0 || limit >= memory_) return;
    memory_ = limit;
    memory_folder_ = folder;
    is_cgroup_v1_ = v1;
  };
  const auto lower_cores = [&](double quota, double period) {
    if (quota > 0 && period > 0) cores_ = std::min(cores_, quota / period);
  };
  each_cgroup("/sys/fs/cgroup", cgroup_path(root, ""), [&](const std::string& folder) {
    lower_memory(folder, "memory.max", false);
    double quota = 0, period = 0;
    if (std::sscanf(proc_content(folder + "/cpu.max").c_str(), "%lf %lf", &quota, &period) == 2)
      lower_cores(quota, period);
  });
  each_cgroup("/sys/fs/cgroup/memory", cgroup_path(root, "memory"),
              [&](const std::string& folder) { lower_memory(folder, "memory.limit_in_bytes", true); });
  each_cgroup("/sys/fs/cgroup/cpu", cgroup_path(root, "cpu"), [&](const std::string& folder) {
    lower_cores(limit_of(folder + "/cpu.cfs_quota_us"), limit_of(folder + "/cpu.cfs_period_us"));
  });
  read();
}

void ProcReader::find_tree() {
  // Parents of processes outside of the tree do not change, so they are read once.
  std::unordered_map<pid_t, pid_t> parents;
  each_number("/proc", [&](pid_t pid) {
    const auto former = parents_.find(pid);
    parents[pid] = former != parents_.end() ? former->second : proc_stat(pid).parent;
  });
  parents_ = std::move(parents);
  tree_.assign(1, root_);
  std::unordered_map<pid_t, std::vector<pid_t>> children;
  for (const auto& [pid, parent] : parents_) children[parent].push_back(pid);
  for (size_t i = 0; i < tree_.size(); ++i) {
    const auto found = children.find(tree_[i]);
    if (found != children.end()) tree_.insert(tree_.end(), found->second.begin(), found->second.end());
  }
  std::sort(tree_.begin() + 1, tree_.end());
}

ProcReader::Counters ProcReader::counters() {
  Counters now;
  for (const pid_t pid : tree_) {
    const ProcStat stat = proc_stat(pid);
    now.cpu += stat.ticks / ticks_per_second();
    now.faults += stat.faults;
    const std::string io = proc_content(of_process(pid, "io"));
    now.read += proc_value(io, "read_bytes:");
    now.written += proc_value(io, "write_bytes:");
  }
  double user = 0, nice = 0, system = 0, idle = 0, wait = 0, irq = 0, soft = 0;
  std::sscanf(proc_content("/proc/stat").c_str(), "cpu %lf %lf %lf %lf %lf %lf %lf", &user, &nice, &system,
              &idle, &wait, &irq, &soft);
  now.machine_cpu = (user + nice + system + irq + soft) / ticks_per_second();
  const std::string paging = proc_content("/proc/vmstat");
  now.swapped = page_bytes() * (proc_value(paging, "pswpin ") + proc_value(paging, "pswpout "));
  const std::string pressure = proc_content("/proc/pressure/memory");
  const size_t total = pressure.find("total=");
  if (total != std::string::npos)
    now.memory_stall = 1e-6 * std::strtod(pressure.c_str() + total + 6, nullptr);
  return now;
}

double ProcReader::tree_memory() {
  double resident = 0, peak = 0;
  std::unordered_map<pid_t, double> high_water;
  for (const pid_t pid : tree_) {
    const std::string status = proc_content(of_process(pid, "status"));
    const double now = 1024 * proc_value(status, "VmRSS:"), high = 1024 * proc_value(status, "VmHWM:");
    const auto before = high_water_.find(pid);
    resident += now;
    // A high-water mark that has risen is the peak of this interval.
    peak += before != high_water_.end() && high > before->second ? std::max(high, now) : now;
    high_water[pid] = high;
  }
  high_water_ = std::move(high_water);
  share_.run(tree_ != shared_tree_, [&] {
    double proportional = 0;
    for (const pid_t pid : tree_) {
      const std::string rollup = proc_content(of_process(pid, "smaps_rollup"));
      proportional += 1024 * proc_value(rollup, "Pss:", proc_value(rollup, "Rss:"));
    }
    shared_ = proportional > 0 ? std::max(0.0, resident - proportional) : 0;
    shared_tree_ = tree_;
  });
  return std::max(0.0, peak - shared_);
}

double ProcReader::busiest_thread() {
  double busiest = 0;
  threads_.run(false, [&] {
    std::unordered_map<uint64_t, double> times;
    for (const pid_t pid : tree_) {
      const std::string folder = of_process(pid, "task/");
      each_number(folder, [&](pid_t thread) {
        const uint64_t key = (uint64_t(pid) << 32) | uint32_t(thread);
        const double now =
            1e-9 * std::strtod(proc_content(folder + std::to_string(thread) + "/schedstat").c_str(), nullptr);
        const auto before = thread_times_.find(key);
        // A thread that is new has run since it began, or, at the first reading, before the monitor started.
        const double from = before != thread_times_.end() ? before->second : thread_times_.empty() ? now : 0;
        busiest = std::max(busiest, now - from);
        times[key] = now;
      });
    }
    thread_times_ = std::move(times);
  });
  return busiest;
}

double ProcReader::machine_memory() const {
  if (memory_folder_.empty())
    return memory_ - 1024 * proc_value(proc_content("/proc/meminfo"), "MemAvailable:");
  // Pages of files that nobody uses are freed when memory is needed.
  const char* names[2][2] = {{"/memory.current", "inactive_file "},
                             {"/memory.usage_in_bytes", "total_inactive_file "}};
  const auto& [usage, files] = names[is_cgroup_v1_ ? 1 : 0];
  return std::max(0.0, limit_of(memory_folder_ + usage) -
                           proc_value(proc_content(memory_folder_ + "/memory.stat"), files));
}

double ProcReader::busiest_disk() {
  const std::string text = proc_content("/proc/diskstats");
  double busiest = 0;
  for (size_t at = 0; at < text.size(); at = std::min(text.find('\n', at), text.size()) + 1) {
    char name[64] = "";
    double milliseconds = 0;
    // The tenth number after the name is the time with requests in flight.
    if (std::sscanf(text.c_str() + at, " %*d %*d %63s %*f %*f %*f %*f %*f %*f %*f %*f %*f %lf", name,
                    &milliseconds) != 2)
      continue;
    const std::string disk = name;
    if (disk.rfind("loop", 0) == 0 || disk.rfind("ram", 0) == 0 || disk.rfind("zram", 0) == 0) continue;
    const auto before = disk_times_.find(disk);
    const double seconds =
        before == disk_times_.end() ? 0 : std::max(0.0, 1e-3 * milliseconds - before->second);
    disk_times_[disk] = 1e-3 * milliseconds;
    disk_totals_[disk] += seconds;
    busiest = std::max(busiest, seconds);
  }
  return busiest;
}

MonitorSample ProcReader::read() {
  find_.run(tree_.empty(), [&] { find_tree(); });
  const Counters now = counters();
  const auto grown = [&](double Counters::* member) { return std::max(0.0, now.*member - last_.*member); };
  MonitorSample sample;
  sample.cpu_seconds = grown(&Counters::cpu);
  sample.major_faults = grown(&Counters::faults);
  sample.read_bytes = grown(&Counters::read);
  sample.written_bytes = grown(&Counters::written);
  sample.machine_cpu_seconds = grown(&Counters::machine_cpu);
  sample.swapped_bytes = grown(&Counters::swapped);
  sample.memory_stall_seconds = grown(&Counters::memory_stall);
  last_ = now;
  sample.thread_seconds = busiest_thread();
  sample.memory_peak = tree_memory();
  sample.machine_memory_peak = machine_memory();
  sample.disk_seconds = busiest_disk();
  sample.processes = double(tree_.size());
  return sample;
}

MonitorMachine ProcReader::machine() const {
  MonitorMachine machine;
  machine.cores = cores_;
  machine.memory = memory_;
  double longest = 0;
  for (const auto& [disk, seconds] : disk_totals_) {
    if (seconds > longest) longest = seconds, machine.disk = disk;
  }
  return machine;
}

}  // namespace shoestring::runs
