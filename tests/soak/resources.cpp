#include "tests/soak/resources.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "tests/support/daemon/process.h"
#include "tests/support/daemon/sanitizer.h"
#include "tests/support/file_text.h"

namespace bulkhead::soak {
namespace {

namespace fs = std::filesystem;

/// But for the folders of soaks and tests that run at the same time.
std::int64_t entries(const fs::path& folder) {
    std::error_code ignored;
    std::int64_t count = 0;
    for (fs::directory_iterator entry{folder, ignored}, end; !ignored && entry != end; entry.increment(ignored))
        count += entry->path().filename().string().starts_with("bh-") ? 0 : 1;
    return count;
}

std::int64_t status_number(pid_t pid, const std::string& field) {
    std::istringstream status{test::file_text("/proc/" + std::to_string(pid) + "/status")};
    for (std::string line; std::getline(status, line);)
        if (line.starts_with(field + ":")) return std::stoll(line.substr(field.size() + 1));
    return 0;
}

/// Memfds by what the descriptors point to: a leaked slab is one that nobody serves.
std::int64_t memfds(pid_t pid) {
    std::int64_t count = 0;
    std::error_code ignored;
    for (fs::directory_iterator fd{"/proc/" + std::to_string(pid) + "/fd", ignored}, end; !ignored && fd != end;
         fd.increment(ignored)) {
        std::error_code gone;
        if (fs::read_symlink(fd->path(), gone).string().starts_with("/memfd:")) ++count;
    }
    return count;
}

std::int64_t cgroups(pid_t keeper) {
    const std::string folder = "/bulkhead-" + std::to_string(keeper);
    std::int64_t count = 0;
    std::error_code ignored;
    for (fs::recursive_directory_iterator entry{"/sys/fs/cgroup", ignored}, end; !ignored && entry != end;
         entry.increment(ignored)) {
        std::error_code gone;
        if (entry->is_directory(gone) && entry->path().string().find(folder) != std::string::npos) ++count;
    }
    return count;
}

void add_process(Resources& all, const std::string& name, pid_t pid) {
    all[name + " descriptors"] = entries("/proc/" + std::to_string(pid) + "/fd");
    all[name + " threads"] = status_number(pid, "Threads");
    all[name + " memfds"] = memfds(pid);
    all[name + " resident KiB"] = status_number(pid, "VmRSS");
}

std::int64_t slabs_mapped(pid_t worker) {
    std::istringstream maps{test::file_text("/proc/" + std::to_string(worker) + "/maps")};
    std::int64_t slabs = 0;
    for (std::string line; std::getline(maps, line);)
        for (const char* kind : {"/memfd:bulkhead:", "/memfd:fake-cuda "})
            slabs += line.find(kind) != std::string::npos ? 1 : 0;
    return slabs;
}

std::int64_t value_of(const Resources& all, const std::string& name) {
    const auto found = all.find(name);
    return found == all.end() ? 0 : found->second;
}

bool drifts(const std::string& name, std::int64_t before, std::int64_t now) {
    if (before < 0 || now < 0) return true;  // not known
    if (!name.ends_with("KiB")) return now != before;
    // Sanitizers keep what was freed.
    return !test::is_sanitized && now > before + resident_slack_kib;
}

}  // namespace

Resources measure(pid_t keeper, pid_t supervisor, const std::string& socket) {
    Resources all;
    add_process(all, "keeper", keeper);
    if (supervisor != 0) add_process(all, "supervisor", supervisor);
    all["own memfds"] = memfds(::getpid());
    all["own descriptors"] = entries("/proc/self/fd");

    std::int64_t processes = 0;
    std::int64_t zombies = 0;
    for (const auto& entry : fs::directory_iterator{"/proc"}) {
        const std::string name = entry.path().filename().string();
        if (name.find_first_not_of("0123456789") != std::string::npos) continue;
        const std::string stat = test::file_text(entry.path() / "stat");
        const std::size_t paren = stat.rfind(')');
        if (paren == std::string::npos || paren + 4 >= stat.size()) continue;
        if (stat[paren + 2] == 'Z' && std::atoi(stat.c_str() + paren + 4) == keeper) ++zombies;
        if (test::file_text(entry.path() / "environ").find("BULKHEAD_SOCKET=" + socket + '\0') != std::string::npos)
            ++processes;
    }
    all["processes of the daemon"] = processes;
    all["zombies of the keeper"] = zombies;
    all["cgroups"] = cgroups(keeper);
    all["entries in /dev/shm"] = entries("/dev/shm");
    all["entries in $TMPDIR"] = entries(fs::temp_directory_path());
    return all;
}

void add_worker(Resources& all, pid_t worker) {
    add_process(all, "worker", worker);
    all["worker slabs mapped"] = slabs_mapped(worker);
}

void add_workers(Resources& all, const std::vector<pid_t>& workers) {
    for (const pid_t pid : workers) {
        Resources one;
        add_process(one, "workers'", pid);
        one["workers' slabs mapped"] = slabs_mapped(pid);
        for (const auto& [name, value] : one) {
            std::int64_t& sum = all[name];
            sum = name.ends_with("KiB") ? std::max(sum, value) : sum + value;
        }
    }
}

Resources measure_settled(const std::function<Resources()>& take) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{5};
    for (Resources before = take();;) {
        ::poll(nullptr, 0, 100);
        Resources now = take();
        const bool settled = std::ranges::all_of(
            now, [&](const auto& one) { return one.first.ends_with("KiB") || value_of(before, one.first) == one.second; });
        if (settled || std::chrono::steady_clock::now() >= until) return now;
        before = std::move(now);
    }
}

Resources measure_at_rest(const Resources& baseline, const std::function<Resources()>& take) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds{5};
    for (;;) {
        Resources now = take();
        const bool at_rest = std::ranges::none_of(
            baseline, [&](const auto& one) { return drifts(one.first, one.second, value_of(now, one.first)); });
        if (at_rest || std::chrono::steady_clock::now() >= until) return now;
        ::poll(nullptr, 0, 50);
    }
}

int print_drift(const Resources& baseline, const Resources& now) {
    if (baseline.empty()) {
        std::printf("  no baseline: it ended before one could be taken\n");
        return 1;
    }
    int drifted = 0;
    for (const auto& [name, before] : baseline) {
        const std::int64_t value = value_of(now, name);
        const bool drift = drifts(name, before, value);
        drifted += drift ? 1 : 0;
        std::printf("  %-28s %9lld %9lld%s\n", name.c_str(), static_cast<long long>(before),
                    static_cast<long long>(value), drift ? "   DRIFT" : "");
    }
    return drifted;
}

pid_t supervisor_of(pid_t keeper) {
    const std::string number = std::to_string(keeper);
    std::istringstream children{test::file_text("/proc/" + number + "/task/" + number + "/children")};
    for (pid_t pid = 0; children >> pid;)
        if (test::file_text("/proc/" + std::to_string(pid) + "/comm").starts_with("bulkhead-superv") &&
            test::is_alive(pid))
            return pid;
    return 0;
}

}  // namespace bulkhead::soak
