/// A client that forks: the child has no part in its parent's channels.

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include <gtest/gtest.h>

#include "tests/support/clients/channel_calls.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/fake_worker.h"

namespace bulkhead {
namespace {

using namespace test;

int in_child(const std::function<int()>& check) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(check());
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST(ChannelFork, TheChildsChannelIsLostAndTheParentsServes) {
    FakeWorker worker{[](FakeWorker& w) {
        w.greet();
        // The parent's: nothing of the child's came.
        w.answer(w.expect<channel::Infer>().request_id, {});
        w.await_hang_up();
    }};
    std::optional<Channel> channel = adopt(worker).value();
    const Input x = filled(*channel, {1, 2, 3});

    EXPECT_EQ(in_child([&] {
                  const Result<Reply> reply = channel->infer({.retry_safe = true});
                  if (reply || reply.error().code != ErrorCode::worker_lost) return 1;
                  channel.reset();  // unmaps and closes nothing that the child has made since
                  return 0;
              }),
              0);

    EXPECT_TRUE(infer(*channel, x));
}

TEST(ChannelFork, TheChildsControlClientMakesAConnectionOfItsOwn) {
    FakeDaemon daemon{[](FakeDaemon& d) {
        d.answer(d.request("daemon.info"), 1);
        const auto parents = d.request("fleet.status");  // the parent's: the child's went elsewhere
        d.answer(parents, 2);
        d.next_connection();  // only now the child's: it waits in the backlog meanwhile
        d.pong();
        d.answer(d.request("fleet.status"), 3);
    }};
    ControlClient control = daemon.connect();
    ASSERT_TRUE(control.call("daemon.info"));
    const pid_t child = ::fork();
    if (child == 0) {
        const Result<Answer> answer = control.call("fleet.status");
        ::_exit(answer && answer->result == 3 ? 0 : 1);
    }
    EXPECT_EQ(control.call("fleet.status").value().result, 2);
    int status = 0;
    ::waitpid(child, &status, 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace bulkhead
