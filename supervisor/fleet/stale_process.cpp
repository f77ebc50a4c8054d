#include "supervisor/fleet/stale_process.h"

#include <unistd.h>

#include <map>
#include <memory>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/reclaim/cgroup.h"

namespace bulkhead::supervisor {

std::vector<StaleProcess> kill_stale_processes(std::string_view socket, const std::set<std::string>& keep) {
    std::vector<StaleProcess> killed;
    const auto is_marked = [&](pid_t pid) {
        const auto environment = read_proc_file(pid, "environ", limits::environ_bytes_max);
        if (!environment || environment_value(*environment, "BULKHEAD_SOCKET") != socket) return false;
        const auto marker = environment_value(*environment, "BULKHEAD_WORKER");
        return marker && !keep.contains(std::string{*marker});
    };
    const auto kill_if = [&](pid_t pid, const std::function<bool(pid_t)>& is_meant) {
        std::string name = process_name(pid);
        if (UniqueFd pidfd = kill_process_if(pid, is_meant)) killed.push_back({pid, std::move(name), std::move(pidfd)});
    };
    // First by cgroup, which also finds a process that hangs in its exit and has no
    // environment left.
    const auto members = Cgroups::left_behind(::getppid(), socket);
    for (const auto& [pid, folder] : members) kill_if(pid, [&](pid_t one) { return cgroup_has(folder, one); });
    for (const pid_t pid : own_processes())
        if (pid != ::getppid() && !members.contains(pid) && is_marked(pid)) kill_if(pid, is_marked);
    return killed;
}

namespace {

/// Lives  until all processes are gone; the callbacks that it waits for own it
class StaleProcessWatch : public std::enable_shared_from_this<StaleProcessWatch> {
public:
    StaleProcessWatch(FleetContext& context, std::vector<StaleProcess> processes, std::chrono::milliseconds alive_max)
        : context_{context}, processes_{std::make_shared<const std::vector<StaleProcess>>(std::move(processes))},
          hold_until_{Deadline::Clock::now() + alive_max}, pause_{context.io} {}

    void look(std::function<void()> looked) {
        context_.blocking.run(
            "looking whether what a former daemon left behind has ended",
            [processes = processes_, &gpus = context_.gpus] { return look_at(*processes, gpus); },
            [self = shared_from_this(), looked = std::move(looked)](const Result<Observation>& observation) {
                if (observation)
                    self->judge(*observation);
                else
                    self->look_after(limits::gpu_retry);
                if (looked) looked();
            });
    }

private:
    /// The result of one look.
    struct Observation {
        std::set<pid_t> alive;
        std::map<std::string, std::set<pid_t>> users;  ///< by GPU UUID; with dead ones that the
                                                       ///< driver still lists
    };

    static Observation look_at(const std::vector<StaleProcess>& processes, Gpus& gpus) {
        Observation observation;
        for (const StaleProcess& process : processes)
            if (!has_ended(process.pidfd)) observation.alive.insert(process.pid);
        if (const auto all = gpus.read())
            for (const Gpu& gpu : *all)
                for (const StaleProcess& process : processes)
                    if (gpu.find(process.pid) != nullptr) observation.users[gpu.uuid].insert(process.pid);
        return observation;
    }

    void judge(const Observation& observation) {
        for (const StaleProcess& process : *processes_)
            if (!observation.alive.contains(process.pid)) context_.gpu_quarantine.process_ended(process.pid);
        if (hold_until_) {
            for (const auto& [uuid, users] : observation.users) gpu_locks_[uuid].take(context_.gpu_mutex(uuid));
            std::erase_if(gpu_locks_, [&](const auto& lock) { return !observation.users.contains(lock.first); });
            if (observation.alive.empty() && observation.users.empty()) return;
            if (Deadline::Clock::now() < *hold_until_) return look_after(limits::settle_poll);
            give_up(observation);
        }
        if (!observation.alive.empty()) look_after(limits::gpu_retry);
    }

    void look_after(Deadline::Clock::duration pause) {
        pause_.arm(pause, [self = shared_from_this()] { self->look({}); });
    }

    void give_up(const Observation& observation) {
        hold_until_.reset();
        gpu_locks_.clear();
        for (const StaleProcess& process : *processes_) {
            const bool lives = observation.alive.contains(process.pid);
            const std::string what =
                fmt::format("process {} ({}), left behind by a former daemon, {}", process.pid, process.name,
                            lives ? "is alive after SIGKILL" : "is gone, but its memory is not back");
            bool is_on_gpu = false;
            for (const auto& [uuid, users] : observation.users) {
                if (!users.contains(process.pid)) continue;
                is_on_gpu = true;
                spdlog::error("gpu={}{} cause={}", uuid, lives ? " quarantined" : "", in_quotes(what));
                if (lives) context_.gpu_quarantine.add(uuid, what, process.pid);
            }
            if (lives && !is_on_gpu) spdlog::error("{}: see /proc/{}/stack", what, process.pid);
        }
    }

    FleetContext& context_;
    std::shared_ptr<const std::vector<StaleProcess>> processes_;
    /// The locks of their GPUs are held until then; empty: given up, it watches on while a process
    /// is alive.
    std::optional<Deadline::Clock::time_point> hold_until_;
    std::map<std::string, AsyncMutex::Lock> gpu_locks_;  ///< by UUID
    Deadline pause_;
};

}  // namespace

void watch_stale_processes(FleetContext& context, std::vector<StaleProcess> processes, std::function<void()> looked,
                           std::chrono::milliseconds alive_max) {
    if (processes.empty()) return looked();
    for (const StaleProcess& process : processes)
        spdlog::warn("killed {} ({}), left behind on this socket", process.name, process.pid);
    std::make_shared<StaleProcessWatch>(context, std::move(processes), alive_max)->look(std::move(looked));
}

}  // namespace bulkhead::supervisor
