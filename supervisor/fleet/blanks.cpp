#include "supervisor/fleet/blanks.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>
#include <spdlog/spdlog.h>

#include "config/limits.h"
#include "supervisor/base/limits.h"
#include "supervisor/base/proc_files.h"
#include "supervisor/base/text.h"
#include "supervisor/fleet/orphan_worker.h"

namespace bulkhead::supervisor {
namespace {

/// How soon the kernel ends it when memory runs out, as text; the former figure. Neither raising it nor going back
/// needs a privilege. Empty, and nothing is done, where it has ended.
std::string set_oom_score(const SpawnedProcess& process, std::string_view score) {
    const UniqueFd file{::open(fmt::format("/proc/{}/oom_score_adj", process.pid).c_str(), O_RDWR | O_CLOEXEC)};
    std::array<char, 16> former{};
    // A file that was opened before is this process', whoever has its number afterwards.
    if (!file || has_ended(process.pidfd)) return {};
    const ssize_t size = ::pread(file.get(), former.data(), former.size(), 0);
    if (size <= 0 || ::pwrite(file.get(), score.data(), score.size(), 0) < 0) return {};
    return {former.data(), static_cast<std::size_t>(size)};
}

/// It has said hello.
bool is_ready(const SpawnedProcess& process) {
    pollfd link{process.link.get(), POLLIN, 0};
    return ::poll(&link, 1, 0) == 1 && (link.revents & POLLIN) != 0;
}

/// What an ended process had printed last, at most so much.
std::string last_output(const UniqueFd& pipe) {
    std::array<char, 4096> text{};
    ::fcntl(pipe.get(), F_SETFL, O_NONBLOCK);
    const ssize_t size = ::read(pipe.get(), text.data(), text.size());
    return size > 0 ? escaped(std::string_view{text.data(), static_cast<std::size_t>(size)}) : std::string{};
}

}  // namespace

Blanks::Blanks(FleetContext& context) : context_{context}, refill_{context.io} {
    context_.take_blank = [this](const SpawnRequest& request) { return take(request); };
}

Blanks::~Blanks() { context_.take_blank = nullptr; }

void Blanks::begin(const config::Fleet& fleet) {
    wanted_ = fleet.blanks;
    if (wanted_ == 0) return;
    std::vector<const config::ModelSpec*> undecided;
    for (const config::ModelSpec& spec : fleet.models) {
        if (spec.device == "cpu") add_kind(spec);
        if (spec.device == "auto") undecided.push_back(&spec);
    }
    if (undecided.empty()) return;
    context_.off_loop.run(
        "looking whether models run on the CPU", [&gpus = context_.gpus] { return place(gpus, "auto"); },
        [this, undecided = std::move(undecided), alive = std::weak_ptr{alive_}](const Result<Device>& device) {
            if (alive.expired() || !device || device->is_gpu()) return;
            for (const config::ModelSpec* spec : undecided) add_kind(*spec);
        });
}

void Blanks::add_kind(const config::ModelSpec& spec) {
    const auto request = context_.launch.request({model, 0, 0}, spec, "");
    if (!request) return;  // its load says why
    auto conditions = StartConditions::of(*request);
    if (std::ranges::find(kinds_, conditions, &Kind::conditions) != kinds_.end()) return;
    kinds_.push_back({&spec, std::move(conditions)});
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
        if (blank->kind->conditions != conditions || has_ended(blank->process.pidfd)) continue;
        if (is_ready(blank->process)) {
            best = blank;
            break;
        }
        if (now - blank->started_at > limits::blank_start_deadline)
            end(blank, fmt::format("it did not say hello within {}",
                                   duration_text(std::chrono::milliseconds{limits::blank_start_deadline}.count())));
        else if (best == waiting_.end())
            best = blank;
    }
    if (best == waiting_.end()) return std::nullopt;
    if (!best->oom_score.empty()) (void)set_oom_score(best->process, best->oom_score);
    Blank blank{best->name, best->has_cgroup, std::move(best->process)};
    waiting_.erase(best);
    refill_after(limits::blank_pause);  // the load comes first
    return blank;
}

// --- how many there are

std::size_t Blanks::missing(const Kind& kind) const {
    const auto there = static_cast<std::size_t>(std::ranges::count(waiting_, &kind, &Waiting::kind)) + kind.starting;
    return std::min(wanted_ - std::min(there, wanted_), config::limits::blanks_max - count());
}

bool Blanks::has_room_for(const Kind& kind) const {
    std::uint64_t planned = bytes() + kind.bytes_at_most;
    for (const Kind& one : kinds_) planned += one.starting * one.bytes_at_most;
    return !room_ || static_cast<std::int64_t>(planned) <= *room_;
}

std::size_t Blanks::count() const {
    std::size_t count = waiting_.size();
    for (const Kind& kind : kinds_) count += kind.starting;
    return count;
}

void Blanks::refill_after(Deadline::Clock::duration pause) {
    refill_is_due_ = true;
    refill_.arm_until(std::max(Deadline::Clock::now() + pause, not_before_), [this] {
        refill_is_due_ = false;
        refill();
    });
}

void Blanks::refill() {
    if (stopping_) return;
    // Generations go to the keeper in their order: a start that looks for its device has one already.
    if (context_.placing > 0) return refill_after(limits::blank_pause);
    for (Kind& kind : kinds_)
        for (std::size_t left = missing(kind); left > 0 && has_room_for(kind); --left) start(kind);
}

void Blanks::fit(std::int64_t bytes_free) {
    room_ = bytes_free;
    while (!waiting_.empty() && static_cast<std::int64_t>(bytes()) > bytes_free)
        end(std::prev(waiting_.end()), "models need its memory");
    const auto lacks = [&](const Kind& kind) { return missing(kind) > 0 && has_room_for(kind); };
    if (!refill_is_due_ && std::ranges::any_of(kinds_, lacks)) refill_after(limits::blank_pause);
}

// --- their processes

void Blanks::start(Kind& kind) {
    const WorkerName name{model, 0, ++context_.generation_last};
    auto request = context_.launch.request(name, *kind.spec, "");
    if (!request) return spdlog::warn("no blank is started: {}", request.error().text());
    contain(*request, context_.cgroups.get());
    const bool has_cgroup = static_cast<bool>(request->cgroup);
    ++kind.starting;
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
        if (stopping_) return one_has_ended();
        not_before_ = Deadline::Clock::now() + limits::blank_retry;
        return refill_after(limits::blank_pause);
    }
    waiting_.push_back({&kind, name, has_cgroup, std::move(*spawned), Deadline::Clock::now(), 0, {}});
    Waiting& blank = waiting_.back();
    if (stopping_) return end(std::prev(waiting_.end()), "the daemon stops");
    blank.oom_score = set_oom_score(blank.process, "1000");
    spdlog::info("worker={} pid={} waits for a model", name.text(), blank.process.pid);
}

void Blanks::on_exited(const WorkerName& name, const ProcessExit& exit) {
    const auto blank = std::ranges::find(waiting_, name, &Waiting::name);
    if (blank == waiting_.end()) return;
    const std::string output = last_output(blank->process.log);
    spdlog::warn("worker={} pid={} ended before it had a model: {}{}", name.text(), blank->process.pid, exit.text(),
                 output.empty() ? "" : "; last output: " + output);
    end(blank, "", exit);
    not_before_ = Deadline::Clock::now() + limits::blank_retry;  // what ended this one may end the next
    refill_after(limits::blank_pause);
}

void Blanks::end(std::list<Waiting>::iterator blank, const std::string& why, std::optional<ProcessExit> exit) {
    FoundWorker found;
    found.name = found.born_as = blank->name;
    found.pid = blank->process.pid;
    found.pidfd = std::move(blank->process.pidfd);
    found.exit = exit;
    waiting_.erase(blank);
    ++ending_;
    OrphanWorker::end(context_, std::move(found), "", why, [this, alive = std::weak_ptr{alive_}] {
        if (alive.expired()) return;
        --ending_;
        one_has_ended();
    });
}

void Blanks::one_has_ended() {
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

void Blanks::measured(const std::map<pid_t, std::uint64_t>& bytes) {
    for (Waiting& blank : waiting_) {
        const auto found = bytes.find(blank.process.pid);
        if (found == bytes.end()) continue;
        blank.bytes = found->second;
        blank.kind->bytes_at_most = std::max(blank.kind->bytes_at_most, blank.bytes);
    }
}

void Blanks::sample() {
    if (waiting_.empty()) return;
    context_.off_loop.run(
        "reading the memory of blanks", [pids = pids()] { return read_memory(pids); },
        [this, alive = std::weak_ptr{alive_}](const Result<std::map<pid_t, std::uint64_t>>& bytes) {
            if (!alive.expired() && bytes) measured(*bytes);
        });
}

std::uint64_t Blanks::bytes() const {
    std::uint64_t sum = 0;
    for (const Waiting& blank : waiting_) sum += blank.bytes;
    return sum;
}

boost::json::object Blanks::status() const {
    return {{"wanted", wanted_ * kinds_.size()},
            {"waiting", waiting_.size()},
            {"ready", std::ranges::count_if(waiting_, [](const Waiting& one) { return is_ready(one.process); })},
            {"pids", boost::json::value_from(pids())},
            {"host_bytes", bytes()}};
}

}  // namespace bulkhead::supervisor
