/// What a replica leaves to the next supervisor, and in which of the keeper's records.

#include <filesystem>

#include "supervisor/base/text.h"
#include "supervisor/replica/replica.h"

namespace bulkhead::supervisor {

using Clock = Deadline::Clock;

/// As of now. A record is that of the present process, or of the last one while the next is not yet spawned.
Ledger Replica::ledger() const {
    Ledger ledger;
    ledger.declaration = declaration_;
    ledger.eager = eager_reason_;
    ledger.note(policy_, Clock::now(), unix_ms());
    ledger.restarts = restarts_;
    ledger.requests = past_requests_;
    ledger.errors = past_errors_;
    ledger.reason = reason_;
    if (last_exit_ && !last_exit_->cause.empty()) {
        const auto& [worker, pid, exit, time_ms, cause] = *last_exit_;
        const auto& [path, lost, due] = last_report_ ? *last_report_ : LastReport{};
        const std::string report = due.empty() ? std::filesystem::path{path}.filename().string() : due;
        ledger.last_crash =
            LastCrash{worker.generation, pid, exit.by_signal, exit.number, time_ms, cause, report, !due.empty(), lost};
    }

    const bool is_of_present = process_ && record_ == process_->name;
    ledger.unload_asked = (is_of_present && unload_asked_) || kept_receipt_.has_value();
    switch (state_) {
    case WorkerState::stopped: ledger.over = !ledger.unload_asked; break;
    case WorkerState::quarantined: ledger.quarantined = true; break;
    case WorkerState::backoff: ledger.restart_due_unix_ms = restart_due_unix_ms_; break;
    default:
        if (is_of_present) break;
        // The next one is not spawned: whoever finds this starts it, if somebody is to have it anyway.
        ledger.over = !policy_.keep_running;
        ledger.restart_due_unix_ms = policy_.keep_running ? since_ms_ : 0;
        break;
    }
    if (!is_of_present) return ledger;

    const auto unix_of = [](const std::optional<Clock::time_point>& at) {
        if (!at) return std::int64_t{0};
        return unix_ms() - std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - *at).count();
    };
    ledger.device = process_->device.text;
    ledger.gpu_uuid = process_->device.uuid;
    ledger.has_cgroup = process_->has_cgroup;
    ledger.granted = process_->granted;
    ledger.capturing = state_ == WorkerState::capturing || process_->lost_in == WorkerState::capturing ||
                       (state_ == WorkerState::adopting && process_->found_capturing);
    ledger.ready_unix_ms = unix_of(process_->ready_at);
    ledger.end_began_unix_ms = unix_of(process_->end_began);
    ledger.aborted = process_->sigabrt_sent;
    ledger.escalation = process_->sigkill_sent   ? Escalation::sigkill
                        : process_->sigterm_sent ? Escalation::sigterm
                                                 : Escalation::none;
    ledger.host_bytes = process_->host_bytes;
    ledger.gpu_free_before = process_->gpu_free_before;
    ledger.adoptions_tried = process_->adoptions_tried;
    ledger.replacing = process_->replacing;
    return ledger;
}

/// Called by whatever changes one of the members above, before what that announces is done. Samples of memory alone
/// are not worth a packet: they go along with the next change.
void Replica::remember() {
    if (!record_) return;
    Ledger now = ledger();
    Ledger compared = now;
    if (remembered_ && remembered_->end_began_unix_ms == 0 && now.end_began_unix_ms == 0)
        compared.host_bytes = remembered_->host_bytes;
    // The same moment, read off two clocks.
    const auto same_moment = [](std::int64_t& a, std::int64_t b) {
        if (a != 0 && b != 0) a = b;
    };
    if (remembered_) {
        same_moment(now.ready_unix_ms, remembered_->ready_unix_ms);
        same_moment(now.end_began_unix_ms, remembered_->end_began_unix_ms);
        compared.ready_unix_ms = now.ready_unix_ms;
        compared.end_began_unix_ms = now.end_began_unix_ms;
        if (remembered_->on_gpu.size() == now.on_gpu.size() && remembered_->crashes == now.crashes)
            compared.on_gpu = now.on_gpu = remembered_->on_gpu;
        if (compared == *remembered_) return;
    }
    context_.keeper.keep(*record_, now.to_text());
    remembered_ = std::move(now);
}

/// A process was spawned: from now on its record carries the ledger.
void Replica::begin_record() {
    const auto former = std::exchange(record_, process_->name);
    remembered_.reset();
    kept_receipt_.reset();
    remember();
    if (former) forget_unless_departed(*former);
}

/// One whose memory is still to come back is forgotten then.
void Replica::forget_unless_departed(const WorkerName& name) {
    for (const Departed& one : departed_)
        if (one.process->name == name) return;
    context_.keeper.forget(name);
}

/// The last process is gone and all is told: only what a preloaded model needs, so that it is not loaded against
/// somebody's will, is kept.
void Replica::end_record() {
    if (!record_ || state_ != WorkerState::stopped || kept_receipt_) return;
    remember();
    if (spec_.preload) return;
    forget_unless_departed(*std::exchange(record_, std::nullopt));
    remembered_.reset();
}

void Replica::receipt_told() {
    kept_receipt_.reset();
    end_record();
}

}  // namespace bulkhead::supervisor
