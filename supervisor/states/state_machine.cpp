#include "supervisor/states/state_machine.h"

#include <cstdlib>
#include <utility>

#include <spdlog/spdlog.h>

#include "supervisor/base/text.h"

namespace bulkhead::supervisor {

StateMachine::StateMachine(boost::asio::io_context& io, WorkerName replica, Changed changed)
    : deadline{io}, name_{std::move(replica)}, changed_{std::move(changed)}, since_ms_{unix_ms()} {}

void StateMachine::transition(WorkerEvent event, const std::string& cause, const std::string& hint) {
    const auto to = next(state_, event);
    if (!to) {  // a defect of this program: the keeper starts another supervisor, and
                // the workers go on
        spdlog::critical("worker={} has no transition from {} by {}", name_.text(), to_string(state_),
                         to_string(event));
        std::abort();
    }
    const WorkerState from = std::exchange(state_, *to);
    deadline.cancel();
    since_ms_ = unix_ms();
    if (from == WorkerState::busy || is_loading(from)) used_ms_ = since_ms_;
    if (!is_serving(from) || !is_serving(state_)) reason_ = cause;
    changed_(from, cause, hint);
}

}  // namespace bulkhead::supervisor
