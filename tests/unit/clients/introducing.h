#pragma once

#include <array>
#include <utility>
#include <vector>

#include "tests/unit/clients/fake_daemon.h"
#include "tests/unit/clients/fake_worker.h"

namespace bulkhead::test {

/// Answers the next channel.open with a worker's end, whichever connection it comes on.
inline void introduce(FakeDaemon& daemon, FakeWorker& worker, bool stateful = false) {
    const boost::json::object asked = daemon.next_request("channel.open");
    const UniqueFd end = worker.client_end();
    const std::array<int, 1> fds{end.get()};
    daemon.answer(asked, {{"fds", 1}, {"stateful", stateful}}, fds);
}

/// A daemon that introduces these workers one after the other.
inline FakeDaemon::Script introducing(std::vector<FakeWorker*> workers, bool stateful = false) {
    return [workers = std::move(workers), stateful](FakeDaemon& d) {
        for (FakeWorker* worker : workers) introduce(d, *worker, stateful);
        d.await_hang_up();
    };
}

}  // namespace bulkhead::test
