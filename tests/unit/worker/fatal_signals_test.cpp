#include "worker/fatal_signals.h"

#include <sys/wait.h>

#include <csignal>

#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

std::pair<std::string, int> last_words_of(void (*die)()) {
    auto [parent_end, child_end] = PacketPair::make().value();
    const pid_t child = ::fork();
    if (child == 0) {
        const SignalStack stack;
        report_fatal_signals(child_end.get());
        die();
        ::_exit(0);
    }
    child_end.reset();
    std::vector<std::byte> buffer(packet_bytes_max);
    Packet packet;
    std::string text;
    if (readable_within(parent_end.get(), patience) && receive_packet(parent_end.get(), buffer, packet))
        text.assign(reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size());
    int status = 0;
    ::waitpid(child, &status, 0);
    return {text, WIFSIGNALED(status) ? WTERMSIG(status) : 0};
}

__attribute__((noinline)) int recurse_for_ever(int depth) {
    volatile char frame[4096];
    frame[0] = static_cast<char>(depth);
    return depth < 0 ? 0 : recurse_for_ever(depth + 1) + frame[0];
}

TEST(FatalSignal, IsToldOnTheLinkAndStillEndsTheProcess) {
    EXPECT_EQ(last_words_of([] { std::abort(); }), (std::pair{std::string{R"({"type":"dying","signal":6})"}, SIGABRT}));
    EXPECT_EQ(last_words_of([] { ::raise(SIGSEGV); }),
              (std::pair{std::string{R"({"type":"dying","signal":11})"}, SIGSEGV}));
}

TEST(FatalSignal, IsToldWhenTheStackOverflowed) {
    EXPECT_EQ(last_words_of([] { (void)recurse_for_ever(1); }),
              (std::pair{std::string{R"({"type":"dying","signal":11})"}, SIGSEGV}));
}

}  // namespace
}  // namespace bulkhead::worker::test
