/// The command generate, against a worker that says what the test wants.

#include <boost/json.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "clients/cli/commands/command.h"
#include "tests/support/clients/fake_daemon.h"
#include "tests/support/clients/fake_worker.h"
#include "tests/unit/cli/ran.h"

namespace bulkhead::cli {
namespace {

namespace json = boost::json;
using test::FakeDaemon;
using test::FakeWorker;
using testing::HasSubstr;
using testing::IsEmpty;

void greet(FakeWorker& worker, std::uint64_t features = wire::feature_streaming) {
    worker.welcome.features |= features;
    worker.welcome.methods = {
        {"generate",
         {{"inputs", {{{"name", "tokens"}, {"dtype", "int64"}, {"shape", {"1..64"}}}}}, {"parameters", json::array{}}}}};
    worker.greet();
}

std::vector<std::int64_t> prompt_of(FakeWorker& worker, const channel::Infer& request) {
    const channel::Tensor& tokens = request.tensors.at(0);
    std::vector<std::int64_t> ids(tokens.lease.size_bytes / sizeof(std::int64_t));
    std::memcpy(ids.data(), worker.slabs.at(0).bytes().data() + tokens.lease.offset_bytes, tokens.lease.size_bytes);
    return ids;
}

void send_part(FakeWorker& worker, std::uint64_t id, json::array tokens) {
    worker.send(
        channel::encode(channel::InferResult{.request_id = id, .more = true, .values = {{"tokens", std::move(tokens)}}})
            .value());
}

void send_last(FakeWorker& worker, std::uint64_t id, const std::vector<std::int64_t>& tokens) {
    const std::uint64_t bytes = tokens.size() * sizeof(std::int64_t);
    const SlabAllocator::Block block = worker.outputs.allocate(bytes).value();
    std::memcpy(worker.slabs.at(1).bytes().data() + block.offset_bytes, tokens.data(), bytes);
    const channel::Tensor all{"tokens",
                              wire::DType::int64,
                              {static_cast<std::int64_t>(tokens.size())},
                              {1, 0, block.offset_bytes, bytes, block.lease_id}};
    worker.send(channel::encode(channel::InferResult{.request_id = id,
                                                     .tensors = {all},
                                                     .values = {{"finish", "stop"},
                                                                {"prompt_tokens", 3},
                                                                {"reused_tokens", 1},
                                                                {"new_tokens", tokens.size()},
                                                                {"first_token_ms", 12.5},
                                                                {"tokens_per_second", 26.14}}})
                    .value());
}

/// One run of `generate fake ARGUMENTS` while a worker lives this script.
Ran generating(FakeWorker::Script script, std::vector<const char*> arguments) {
    FakeWorker worker{std::move(script)};
    FakeDaemon daemon{[&](FakeDaemon& d) {
        const json::object asked = d.request();
        if (asked.empty()) return;
        const UniqueFd end = worker.client_end();
        const std::array<int, 1> fds{end.get()};
        d.answer(asked, {{"fds", 1}, {"stateful", false}}, fds);
        d.await_hang_up();
    }};
    const std::string socket = daemon.path();
    arguments.insert(arguments.begin(), {"--socket", socket.c_str(), "generate", "fake"});
    return ran(std::move(arguments));
}

TEST(Generate, ShowsIdsAsTheyComeAndThenWhatItTook) {
    const Ran text = generating(
        [](FakeWorker& worker) {
            greet(worker);
            const auto request = worker.expect<channel::Infer>();
            EXPECT_EQ(request.method, "generate");
            EXPECT_EQ(prompt_of(worker, request), (std::vector<std::int64_t>{1, 2, 3}));
            EXPECT_EQ(json::serialize(request.parameters),
                      R"({"temperature":7E-1,"top_k":40,"ras_repeats":2,"seed":7,"max_new_tokens":9,"do_sample":true,"stop":[5,6],)"
                      R"("ignore_stop":true})");
            send_part(worker, request.request_id, {10});
            send_part(worker, request.request_id, {11, 12});
            send_last(worker, request.request_id, {10, 11, 12, 13});
            worker.await_hang_up();
        },
        {"--tokens", "1,2,3", "--temperature", "0.7", "--top-k", "40", "--seed", "7", "--ras-repeats", "2",
         "--max_new_tokens", "9", "--stop", "5 6", "--do-sample", "true", "--ignore-stop"});
    EXPECT_EQ(text.status, exit_done);
    EXPECT_EQ(text.out, "10 11 12 13\n");
    EXPECT_EQ(text.err, "4 tokens (stop), 26.1 tokens/s, the first after 12.5 ms; prompt of 3, 1 of them known already\n");
}

TEST(Generate, WithJsonPrintsAnObjectATokenAndOneAtTheEnd) {
    const Ran as_json = generating(
        [](FakeWorker& worker) {
            greet(worker);
            const auto request = worker.expect<channel::Infer>();
            send_part(worker, request.request_id, {10});
            send_last(worker, request.request_id, {10, 11});
            worker.await_hang_up();
        },
        {"--json", "-t", "[1]"});
    EXPECT_EQ(as_json.status, exit_done);
    EXPECT_THAT(as_json.err, IsEmpty());
    const std::string start = "{\"token\":10}\n{\"token\":11}\n";
    ASSERT_EQ(as_json.out.substr(0, start.size()), start);
    const json::value last = json::parse(as_json.out.substr(start.size()));
    EXPECT_EQ(json::serialize(last.at("tokens")), "[10,11]");
    EXPECT_EQ(last.at("finish"), "stop");
    EXPECT_EQ(last.at("tokens_per_second").as_double(), 26.14);
}

TEST(Generate, SaysAfterHowManyTokensItsWorkerDiedAndWhatCannotBeAsked) {
    struct Case {
        const char* what;
        FakeWorker::Script script;
        std::vector<const char*> arguments;
        const char* out;
        const char* err;  ///< a part of it; empty if it succeeds
    };
    for (const Case& one :
         {Case{"a worker that dies",
               [](FakeWorker& worker) {
                   greet(worker);
                   const auto request = worker.expect<channel::Infer>();
                   send_part(worker, request.request_id, {10});
                   send_part(worker, request.request_id, {11, 12});
               },
               {"-t", "1"},
               "10 11 12\n",
               "generating with fake, after 3 tokens: request 1 (generate): fake is gone: its process has ended, "
               "after 3 tokens of the answer (worker_lost)\n"},
          Case{"one that does not stream",
               [](FakeWorker& worker) {
                   greet(worker, 0);
                   send_last(worker, worker.expect<channel::Infer>().request_id, {4, 5});
                   worker.await_hang_up();
               },
               {"-t", "1"},
               "4 5\n",
               ""},
          Case{"a model that does not generate",
               [](FakeWorker& worker) {
                   worker.greet();
                   worker.await_hang_up();
               },
               {"-t", "1"},
               "",
               "method \"generate\" of fake (method_unknown)\n  its methods: forward"},
          Case{"a parameter given twice",
               [](FakeWorker& worker) {
                   greet(worker);
                   worker.await_hang_up();
               },
               {"-t", "1", "--seed", "1", "-p", "seed=2"},
               "",
               "seed twice (input_invalid)"}}) {
        SCOPED_TRACE(one.what);
        const Ran text = generating(one.script, one.arguments);
        EXPECT_EQ(text.status, *one.err == '\0' ? exit_done : exit_failed);
        EXPECT_EQ(text.out, one.out);
        EXPECT_THAT(text.err, HasSubstr(one.err));
    }
}

}  // namespace
}  // namespace bulkhead::cli
