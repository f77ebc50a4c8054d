#include "supervisor/replica/kept_record.h"

#include <utility>

namespace bulkhead::supervisor {

std::optional<WorkerName> KeptRecord::begin(const WorkerName& worker) {
    sent_.reset();
    return std::exchange(worker_, worker);
}

WorkerName KeptRecord::end() {
    sent_.reset();
    return *std::exchange(worker_, std::nullopt);
}

/// A sample of memory alone is not worth a packet: it goes along with the next change.
void KeptRecord::keep(ReplicaRecord now) {
    if (!worker_) return;
    ReplicaRecord compared = now;
    if (sent_) {
        if (sent_->end_began_unix_ms == 0 && now.end_began_unix_ms == 0) compared.host_bytes = sent_->host_bytes;
        // The same moment, computed from two clocks, differs by a millisecond.
        const auto same_moment = [](std::int64_t& a, std::int64_t b) {
            if (a != 0 && b != 0) a = b;
        };
        same_moment(now.ready_unix_ms, sent_->ready_unix_ms);
        same_moment(now.end_began_unix_ms, sent_->end_began_unix_ms);
        compared.ready_unix_ms = now.ready_unix_ms;
        compared.end_began_unix_ms = now.end_began_unix_ms;
        if (sent_->on_gpu.size() == now.on_gpu.size() && sent_->crashes == now.crashes)
            compared.on_gpu = now.on_gpu = sent_->on_gpu;
        if (compared == *sent_) return;
    }
    keeper_.keep(*worker_, now.to_text());
    sent_ = std::move(now);
}

}  // namespace bulkhead::supervisor
