#pragma once

#include <array>
#include <utility>
#include <vector>

#include "tests/unit/clients/fake_daemon.h"
#include "tests/unit/clients/fake_worker.h"

namespace bulkhead::test {

/// Answers one channel.open with a worker's line; on the client's first connection, or the next.
inline void introduce(FakeDaemon& daemon, FakeWorker& worker, bool stateful = false) {
    const UniqueFd end = worker.client_end();
    const std::array<int, 1> fds{end.get()};
    daemon.answer(daemon.request("channel.open"), {{"fds", 1}, {"stateful", stateful}}, fds);
}

/// A daemon that introduces these workers one after the other, a connection each.
inline FakeDaemon::Script introducing(std::vector<FakeWorker*> workers, bool stateful = false) {
    return [workers = std::move(workers), stateful](FakeDaemon& d) {
        for (std::size_t i = 0; i < workers.size(); ++i) {
            if (i > 0) d.next_connection();
            introduce(d, *workers[i], stateful);
        }
        d.await_hang_up();
    };
}

}  // namespace bulkhead::test
