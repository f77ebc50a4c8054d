#include "supervisor/fleet/blanks.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include <boost/asio/posix/stream_descriptor.hpp>
#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "config/limits.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/fleet/orphan_worker.h"
#include "supervisor/replica/replica_record.h"

namespace bulkhead::supervisor {
namespace {

/// Sets how soon the kernel kills the process when memory runs out; returns the former value
/// as text. Needs no privilege in either direction. Returns empty and does nothing if the
/// process has ended.
std::string set_oom_score(const SpawnedProcess& process, std::string_view score) {
    const UniqueFd file{::open(fmt::format("/proc/{}/oom_score_adj", process.pid).c_str(), O_RDWR | O_CLOEXEC)};
    std::array<char, 16> former{};
    // Opened before the check: a file of a live process stays its own even if the pid
    // is reused later.
    if (!file || has_ended(process.pidfd)) return {};
    const ssize_t size = ::pread(file.get(), former.data(), former.size(), 0);
    if (size <= 0 || ::pwrite(file.get(), score.data(), score.size(), 0) < 0) return {};
    return {former.data(), static_cast<std::size_t>(size)};
}

/// The process has said hello.
bool is_ready(const SpawnedProcess& process) {
    pollfd link{process.link.get(), POLLIN, 0};
    return ::poll(&link, 1, 0) == 1 && (link.revents & POLLIN) != 0;
}

/// Returns the last output of an ended process, at most 4096 bytes.
std::string last_output(const UniqueFd& pipe) {
    std::array<char, 4096> text{};
    ::fcntl(pipe.get(), F_SETFL, O_NONBLOCK);
    const ssize_t size = ::read(pipe.get(), text.data(), text.size());
    return size > 0 ? escaped(std::string_view{text.data(), static_cast<std::size_t>(size)}) : std::string{};
}

}  // namespace

std::optional<std::uint64_t> bytes_of_process(const Gpu& gpu, pid_t pid) {
    if (!gpu.processes_known) return std::nullopt;
    const GpuProcess* process = gpu.find(pid);
    return process == nullptr ? 0 : process->bytes;
}

/// The start of a blank on a GPU. Holds the GPU's lock from before the process starts until the
/// blank has said hello, which shows that its context exists, and the driver was asked how much
/// memory the blank holds.
///
/// Destruction passes the lock on; no callback runs after it.
/// Thread  the loop
class ContextStart {
public:
    /// Receives the GPU memory of the blank; empty if the driver does not report it.
    /// Errors  deadline_exceeded: the blank did not say hello
    using OnMade = std::function<void(Result<std::optional<std::uint64_t>>)>;

    /// Calls `begun` when it has the lock, never from within the constructor.
    ContextStart(FleetContext& context, const Device& device, std::function<void()> begun)
        : context_{context}, gpu_uuid_{device.uuid}, link_{context.io}, deadline_{context.io} {
        gpu_lock_.take(context_.gpu_mutex(gpu_uuid_), std::move(begun));
    }

    /// Calls `made` once and later. A process that ends makes its link readable too, and so counts
    /// as ready here.
    void watch(const SpawnedProcess& process, OnMade made) {
        made_ = std::move(made);
        deadline_.arm(limits::blank_start_deadline, [this] {
            std::exchange(made_, nullptr)(
                Error{ErrorCode::deadline_exceeded,
                      fmt::format("it did not say hello within {}", duration_text(limits::blank_start_deadline)),
                      {}});
        });
        const int link = ::fcntl(process.link.get(), F_DUPFD_CLOEXEC, 0);
        if (link < 0) {  // fail now: the deadline would hold the GPU much longer
            return deadline_.arm(Deadline::Clock::duration{}, [this, error = system_error("watching its link", errno)] {
                std::exchange(made_, nullptr)(error);
            });
        }
        link_.assign(link);
        link_.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                         [this, pid = process.pid, alive = std::weak_ptr{alive_}](boost::system::error_code ec) {
                             if (!alive.expired() && !ec) read(pid);
                         });
    }

private:
    void read(pid_t pid) {
        deadline_.cancel();
        link_.close();
        context_.blocking.run(
            "asking what a blank holds",
            [&gpus = context_.gpus, uuid = gpu_uuid_, pid]() -> std::optional<std::uint64_t> {
                const auto gpu = gpus.read(uuid);
                return gpu ? bytes_of_process(*gpu, pid) : std::nullopt;
            },
            [this, alive = std::weak_ptr{alive_}](const Result<std::optional<std::uint64_t>>& bytes) {
                if (!alive.expired()) std::exchange(made_, nullptr)(bytes ? *bytes : std::nullopt);
            });
    }

    FleetContext& context_;
    const std::string gpu_uuid_;
    AsyncMutex::Lock gpu_lock_;
    boost::asio::posix::stream_descriptor link_;  ///< a duplicate: nothing is read from it
    Deadline deadline_;
    OnMade made_;
    std::shared_ptr<char> alive_ = std::make_shared<char>();
};

Blanks::Blanks(FleetContext& context) : context_{context}, refill_{context.io} {
    context_.take_blank = [this](const SpawnRequest& request) { return take(request); };
}

Blanks::~Blanks() { context_.take_blank = nullptr; }

void Blanks::begin(const config::Fleet& fleet, const GpusOf& gpus_of) {
    are_wanted_ = !fleet.blanks.empty();
    std::vector<const config::ModelSpec*> undecided;
    for (const auto& [name, wanted] : fleet.blanks)
        for (const config::ModelSpec& spec : fleet.models) {
            if (name == "cpu" && spec.device == "cpu") add_kind(spec, {}, wanted);
            if (name == "cpu" && spec.device == "auto") undecided.push_back(&spec);
            for (const Device& gpu : gpus_of(spec))
                if (name == gpu.text || name == gpu.uuid) add_kind(spec, gpu, wanted);
        }
    if (undecided.empty()) return;
    context_.blocking.run(
        "looking whether models run on the CPU", [&gpus = context_.gpus] { return place(gpus, "auto"); },
        [this, undecided = std::move(undecided), wanted = fleet.blanks.at("cpu"),
         alive = std::weak_ptr{alive_}](const Result<Device>& device) {
            if (alive.expired() || !device || device->is_gpu()) return;
            for (const config::ModelSpec* spec : undecided) add_kind(*spec, *device, wanted);
        });
}

void Blanks::add_kind(const config::ModelSpec& spec, const Device& device, std::size_t wanted) {
    const auto request = context_.launch.request({model, 0, 0}, spec, device.uuid);
    if (!request) return;  // a load of the model reports the error
    auto conditions = StartConditions::of(*request);
    if (std::ranges::find(kinds_, conditions, &Kind::conditions) != kinds_.end()) return;
    kinds_.push_back({&spec, device, wanted, std::move(conditions)});
    refill_after(limits::blank_pause);
}

// --- what a load takes

std::optional<Blank> Blanks::take(const SpawnRequest& request) {
    if (waiting_.empty()) return std::nullopt;
    const auto conditions = StartConditions::of(request);
    const auto now = Deadline::Clock::now();
    auto best = waiting_.end();
    for (auto one = waiting_.begin(); one != waiting_.end();) {
        const auto blank = one++;
        if (blank->kind->conditions != conditions || !blank->has_context || has_ended(blank->process.pidfd)) continue;
        if (is_ready(blank->process)) {
            best = blank;
            break;
        }
        if (now - blank->started_at > limits::blank_start_deadline)
            end(blank, fmt::format("it did not say hello within {}", duration_text(limits::blank_start_deadline)));
        else if (best == waiting_.end())
            best = blank;
    }
    if (best == waiting_.end()) return std::nullopt;
    if (!best->oom_score.empty()) (void)set_oom_score(best->process, best->oom_score);
    Blank blank{best->name, best->has_cgroup, std::move(best->process)};
    waiting_.erase(best);
    failures_ = 0;
    refill_after(limits::blank_pause);  // let the load go first
    return blank;
}

// --- how many there are

std::size_t Blanks::missing(const Kind& kind) const {
    const auto there = static_cast<std::size_t>(std::ranges::count(waiting_, &kind, &Waiting::kind)) + kind.starting;
    return std::min(kind.wanted - std::min(there, kind.wanted), config::limits::blanks_max - count());
}

/// Bytes that blanks hold, or will hold once started.
std::uint64_t Blanks::planned(const memory::DeviceId& device) const {
    std::uint64_t sum = bytes(device);
    for (const Kind& kind : kinds_) {
        if (device == memory::host) sum += kind.starting * kind.bytes_at_most;
        if (device == kind.device.uuid) sum += kind.starting * kind.context_bytes;
    }
    return sum;
}

bool Blanks::has_room_for(const Kind& kind) const {
    const auto fits = [this](const memory::DeviceId& device, std::uint64_t bytes) {
        const auto room = room_.find(device);
        if (room == room_.end()) return device == memory::host;
        return static_cast<std::int64_t>(planned(device) + bytes) <= room->second;
    };
    return fits(std::string{memory::host}, kind.bytes_at_most) &&
           (!kind.device.is_gpu() || fits(kind.device.uuid, kind.context_bytes));
}

std::size_t Blanks::count() const {
    std::size_t count = waiting_.size();
    for (const Kind& kind : kinds_) count += kind.starting;
    return count;
}

void Blanks::refill_after(Deadline::Clock::duration pause) {
    refill_.arm_until(std::max(Deadline::Clock::now() + pause, not_before_), [this] { refill(); });
}

void Blanks::refill() {
    if (stopping_) return;
    // The keeper requires spawns in the order of generations: a start that looks for its device
    // already has one.
    if (context_.placing > 0) return refill_after(limits::blank_pause);
    for (Kind& kind : kinds_)
        for (std::size_t left = missing(kind); left > 0 && !kind.context && has_room_for(kind); --left) start(kind);
}

void Blanks::fit(const memory::DeviceId& device, std::int64_t bytes_free) {
    room_[device] = bytes_free;
    end_surplus(device);
    const auto lacks = [&](const Kind& kind) { return missing(kind) > 0 && !kind.context && has_room_for(kind); };
    if (!refill_.is_armed() && std::ranges::any_of(kinds_, lacks)) refill_after(limits::blank_pause);
}

void Blanks::end_surplus(const memory::DeviceId& device) {
    const auto room = room_.find(device);
    if (room == room_.end()) return;
    for (auto next = waiting_.end(); next != waiting_.begin();) {
        const auto blank = std::prev(next);
        if (static_cast<std::int64_t>(bytes(device)) <= room->second) return;
        if (device == memory::host || device == blank->kind->device.uuid)
            end(blank, "models need its memory");
        else
            next = blank;
    }
}

// --- their processes

void Blanks::start(Kind& kind) {
    ++kind.starting;
    if (!kind.device.is_gpu()) return spawn(kind);
    kind.context = std::make_unique<ContextStart>(context_, kind.device, [this, &kind] {
        --kind.starting;
        if (!stopping_ && context_.placing == 0 && has_room_for(kind)) {  // as in `refill`
            ++kind.starting;
            return spawn(kind);
        }
        kind.context.reset();
        stopping_ ? one_has_ended() : refill_after(limits::blank_pause);
    });
}

void Blanks::spawn(Kind& kind) {
    const WorkerName name{model, 0, ++context_.generation_last};
    auto request = context_.launch.request(name, *kind.spec, kind.device.uuid);
    if (!request) return on_spawned(kind, name, false, request.error());
    contain(*request, context_.cgroups.get());
    const bool has_cgroup = static_cast<bool>(request->cgroup);
    context_.keeper.spawn(
        std::move(*request),
        [this, &kind, name, has_cgroup, alive = std::weak_ptr{alive_}](Result<SpawnedProcess> spawned) {
            if (!alive.expired()) on_spawned(kind, name, has_cgroup, std::move(spawned));
        },
        [this, name, alive = std::weak_ptr{alive_}](const ProcessExit& exit) {
            if (!alive.expired()) on_exited(name, exit);
        });
}

void Blanks::on_spawned(Kind& kind, const WorkerName& name, bool has_cgroup, Result<SpawnedProcess> spawned) {
    --kind.starting;
    if (!spawned) {
        spdlog::warn("no blank is started: {}", spawned.error().text());
        if (has_cgroup) context_.cgroups->remove(name);
        kind.context.reset();
        return stopping_ ? one_has_ended() : one_has_failed();
    }
    const bool on_gpu = kind.device.is_gpu();
    waiting_.push_back({&kind, name, has_cgroup, std::move(*spawned), Deadline::Clock::now(), !on_gpu});
    const auto blank = std::prev(waiting_.end());
    if (on_gpu) {
        blank->gpu_bytes = kind.context_bytes;
        ReplicaRecord record;
        record.device = kind.device.text;
        record.gpu_uuid = kind.device.uuid;
        context_.keeper.keep(name, record.to_text());
    }
    if (stopping_) return end(blank, "the daemon stops");
    blank->oom_score = set_oom_score(blank->process, "1000");
    spdlog::info("worker={} pid={} waits for a model{}", name.text(), blank->process.pid,
                 on_gpu ? " on " + kind.device.text : "");
    if (!on_gpu) return;
    kind.context->watch(blank->process, [this, &kind, name](const auto& bytes) { on_context(kind, name, bytes); });
    end_surplus(kind.device.uuid);  // its memory may have been granted to a load meanwhile
}

void Blanks::on_context(Kind& kind, const WorkerName& name, const Result<std::optional<std::uint64_t>>& bytes) {
    const auto blank = std::ranges::find(waiting_, name, &Waiting::name);
    if (!bytes) {
        end(blank, bytes.error().text());
        return one_has_failed();
    }
    blank->has_context = true;
    failures_ = 0;
    refill_after(limits::blank_pause);
    if (*bytes) blank->gpu_bytes = kind.context_bytes = **bytes;
    kind.context.reset();
    end_surplus(kind.device.uuid);
}

void Blanks::on_exited(const WorkerName& name, const ProcessExit& exit) {
    const auto blank = std::ranges::find(waiting_, name, &Waiting::name);
    if (blank == waiting_.end()) return;
    const std::string output = last_output(blank->process.log);
    spdlog::warn("worker={} pid={} ended before it had a model: {}{}", name.text(), blank->process.pid, exit.text(),
                 output.empty() ? "" : "; last output: " + output);
    end(blank, "", exit);
    one_has_failed();
}

/// Backs off: what ended this blank may end the next one.
void Blanks::one_has_failed() {
    not_before_ =
        Deadline::Clock::now() + limits::blank_retry * (1 << std::min(failures_++, limits::blank_retries_longer));
    refill_after(limits::blank_pause);
}

void Blanks::end(std::list<Waiting>::iterator blank, const std::string& why, std::optional<ProcessExit> exit) {
    FoundWorker found;
    found.name = found.born_as = blank->name;
    found.pid = blank->process.pid;
    found.pidfd = std::move(blank->process.pidfd);
    found.exit = exit;
    Kind& kind = *blank->kind;
    const bool starts = !blank->has_context;
    waiting_.erase(blank);
    ++ending_;
    end_orphan(context_, std::move(found), kind.device.uuid, why, [this, alive = std::weak_ptr{alive_}] {
        if (alive.expired()) return;
        --ending_;
        one_has_ended();
    });
    if (starts) kind.context.reset();
}

void Blanks::when_gone(std::function<void()> gone) {
    gone_waiters_.push_back(std::move(gone));
    one_has_ended();
}

void Blanks::one_has_ended() {
    if (ending_ == 0)
        for (const auto& gone : std::exchange(gone_waiters_, {})) gone();
    const bool none_starts = std::ranges::all_of(kinds_, [](const Kind& kind) { return kind.starting == 0; });
    if (!stopping_ || ending_ > 0 || !none_starts) return;
    for (const auto& ended : std::exchange(stop_waiters_, {})) ended();
}

void Blanks::stop(std::function<void()> ended) {
    refill_.cancel();
    stopping_ = true;
    stop_waiters_.push_back(std::move(ended));
    while (!waiting_.empty()) end(waiting_.begin(), "the daemon stops");
    one_has_ended();
}

// --- what they hold

std::vector<pid_t> Blanks::pids() const {
    std::vector<pid_t> pids;
    for (const Waiting& blank : waiting_) pids.push_back(blank.process.pid);
    return pids;
}

std::map<pid_t, std::uint64_t> Blanks::read_memory(const std::vector<pid_t>& pids) {
    std::map<pid_t, std::uint64_t> bytes;
    for (const pid_t pid : pids) bytes[pid] = read_resident_bytes(pid).value_or(0);
    return bytes;
}

void Blanks::measured(const std::map<pid_t, std::uint64_t>& on_host, const std::vector<Gpu>& gpus) {
    for (Waiting& blank : waiting_) {
        Kind& kind = *blank.kind;
        if (const auto found = on_host.find(blank.process.pid); found != on_host.end()) {
            blank.bytes = found->second;
            kind.bytes_at_most = std::max(kind.bytes_at_most, blank.bytes);
        }
        const auto gpu = std::ranges::find(gpus, kind.device.uuid, &Gpu::uuid);
        if (gpu == gpus.end() || !blank.has_context) continue;
        if (const auto bytes = bytes_of_process(*gpu, blank.process.pid)) {
            blank.gpu_bytes = *bytes;
            kind.context_bytes = std::max(kind.context_bytes, *bytes);
        }
    }
}

void Blanks::sample() {
    if (waiting_.empty()) return;
    context_.blocking.run(
        "reading the memory of blanks", [pids = pids()] { return read_memory(pids); },
        [this, alive = std::weak_ptr{alive_}](const Result<std::map<pid_t, std::uint64_t>>& bytes) {
            if (!alive.expired() && bytes) measured(*bytes, {});
        });
}

std::uint64_t Blanks::bytes(const memory::DeviceId& device) const {
    std::uint64_t sum = 0;
    for (const Waiting& blank : waiting_) {
        if (device == memory::host) sum += blank.bytes;
        if (device == blank.kind->device.uuid) sum += blank.gpu_bytes;
    }
    return sum;
}

boost::json::object Blanks::status() const {
    std::size_t wanted = 0;
    std::uint64_t gpu_bytes = 0;
    for (const Kind& kind : kinds_) wanted += kind.wanted;
    for (const Waiting& blank : waiting_) gpu_bytes += blank.gpu_bytes;
    return {{"wanted", wanted},
            {"waiting", waiting_.size()},
            {"ready", std::ranges::count_if(waiting_, [](const Waiting& one) { return is_ready(one.process); })},
            {"pids", boost::json::value_from(pids())},
            {"host_bytes", bytes(std::string{memory::host})},
            {"gpu_bytes", gpu_bytes}};
}

}  // namespace bulkhead::supervisor
