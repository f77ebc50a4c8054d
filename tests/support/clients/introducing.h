#pragma once

#include <array>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/fake_worker.h"

namespace bulkhead::test {

/// Answers this channel.open with a worker's end.
inline void introduce_to(const boost::json::object& asked, FakeDaemon& daemon, FakeWorker& worker,
                         bool stateful = false) {
    const UniqueFd end = worker.client_end();
    const std::array<int, 1> fds{end.get()};
    daemon.answer(asked, {{"fds", 1}, {"stateful", stateful}}, fds);
}

/// Answers the next one, whichever connection it comes on, after a load of `load`.
inline void introduce(FakeDaemon& daemon, FakeWorker& worker, bool stateful = false,
                      std::chrono::milliseconds load = {}) {
    const boost::json::object asked = daemon.next_request("channel.open");
    std::this_thread::sleep_for(load);
    introduce_to(asked, daemon, worker, stateful);
}

/// A daemon that introduces these workers one after the other.
inline FakeDaemon::Script introducing(std::vector<FakeWorker*> workers, bool stateful = false) {
    return [workers = std::move(workers), stateful](FakeDaemon& d) {
        for (FakeWorker* worker : workers) introduce(d, *worker, stateful);
        d.await_hang_up();
    };
}

}  // namespace bulkhead::test
