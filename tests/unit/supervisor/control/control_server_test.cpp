#include "supervisor/control/control_server.h"

#include <sys/resource.h>

#include <gmock/gmock.h>

#include "supervisor/base/limits.h"
#include "tests/support/no_free_descriptor.h"
#include "tests/support/open_descriptors.h"
#include "tests/unit/supervisor/control_client.h"

namespace bulkhead::supervisor {
namespace {

using test::ControlClient;
using bulkhead::test::open_descriptors;
using testing::HasSubstr;

class ControlServerTest : public testing::Test {
protected:
    ControlServerTest() {
        rpc::MethodTable methods;
        methods["echo"] = [](rpc::Call call) { call.answer(std::move(call.params)); };
        methods["fail"] = [](const rpc::Call& call) {
            call.answer(Error{ErrorCode::model_unknown, "looking", "look again"});
        };
        methods["later"] = [this](rpc::Call call) { later_.push_back(std::move(call)); };
        methods["subscribe"] = [this](const rpc::Call& call) {
            call.sink.lock()->subscribed();
            sinks_.push_back(call.sink);
            call.answer(rpc::Answer{});
        };
        methods["big"] = [](const rpc::Call& call) {
            const auto size = call.params.at("bytes").to_number<std::size_t>();
            call.answer(rpc::Answer{{{"text", std::string(size, 'x')}}});
        };
        methods["open"] = [](const rpc::Call& call) {
            rpc::Answer answer{{{"fds", 1}}};
            answer.fd = UniqueFd{::open("/dev/null", O_RDONLY | O_CLOEXEC)};
            call.answer(std::move(answer));
        };
        server_.emplace(io_, listener_.take(), std::move(methods));
        server_->start();
    }
    ControlClient connect() { return {io_, listener_.connect()}; }

    boost::asio::io_context io_{1};
    test::Listener listener_;
    std::vector<rpc::Call> later_;
    std::vector<std::weak_ptr<NotificationSink>> sinks_;
    std::optional<ControlServer> server_;
};

constexpr auto echo = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\",\"params\":{\"a\":[1,\"ü\"]}}\n";

TEST_F(ControlServerTest, AnswersOneObjectALineAndAnErrorWithItsStory) {
    auto client = connect();
    client.send(echo);
    EXPECT_EQ(client.line(), "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"a\":[1,\"ü\"]}}");
    const auto error = client.call("fail").at("error").as_object();
    EXPECT_EQ(error.at("code").to_number<int>(), -32000);
    EXPECT_EQ(error.at("data"),
              (json::object{{"code", "model_unknown"}, {"attempt", "looking"}, {"remedy", "look again"}}));
    EXPECT_THAT(std::string{error.at("message").as_string()}, HasSubstr("looking"));
}

TEST_F(ControlServerTest, EachKindOfGarbageHasItsNumberAndTheConnectionGoesOn) {
    const std::vector<std::pair<std::string, int>> lines{
        {"this is not JSON", -32700},
        {"{\"jsonrpc\":\"2.0\",", -32700},
        {std::string("\x00\x01\x02\xff", 4), -32700},
        {std::string(5'000, '['), -32700},
        {"[]", -32600},
        {"[{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\"}]", -32600},
        {"7", -32600},
        {"{}", -32600},
        {"{\"id\":1,\"method\":\"echo\"}", -32600},
        {"{\"jsonrpc\":\"1.0\",\"id\":1,\"method\":\"echo\"}", -32600},
        {"{\"jsonrpc\":\"2.0\",\"id\":1}", -32600},
        {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":7}", -32600},
        {"{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"echo\"}", -32600},
        {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"nothing\"}", -32601},
        {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\",\"params\":[1]}", -32602},
        {"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\",\"params\":null}", -32602},
    };
    auto client = connect();
    for (const auto& [line, number] : lines) {
        client.send(line + "\n");
        const auto answer = client.answer();
        ASSERT_TRUE(answer.contains("error")) << line << " gave " << json::serialize(answer);
        EXPECT_EQ(answer.at("error").at("code").to_number<int>(), number) << line;
        EXPECT_TRUE(answer.at("error").at("data").as_object().contains("remedy"));
    }
    client.send("\n\n\r\n" + std::string{echo});  // an empty line has no answer
    EXPECT_THAT(*client.line(), HasSubstr("result"));
}

TEST_F(ControlServerTest, TheIdComesBackAsItWasOrIsRefusedIfItWouldBeSpeltOtherwise) {
    auto client = connect();
    for (const char* id : {"0", "-7", "18446744073709551615", "\"text\"", "null"}) {
        client.send(std::string{"{\"jsonrpc\":\"2.0\",\"method\":\"echo\",\"id\":"} + id + "}\n");
        EXPECT_EQ(client.line(), std::string{"{\"jsonrpc\":\"2.0\",\"id\":"} + id + ",\"result\":{}}");
    }
    for (const char* id : {"1.5", "1e400", "123456789012345678901234567890", "true", "[1]", "{}"}) {
        client.send(std::string{"{\"jsonrpc\":\"2.0\",\"method\":\"echo\",\"id\":"} + id + "}\n");
        const auto answer = client.answer();
        EXPECT_EQ(answer.at("error").at("code").to_number<int>(), -32600) << id;
        EXPECT_TRUE(answer.at("id").is_null()) << id;
    }
}

TEST_F(ControlServerTest, ANotificationIsCarriedOutAndNotAnswered) {
    auto client = connect();
    client.send("{\"jsonrpc\":\"2.0\",\"method\":\"nothing\"}\n{\"jsonrpc\":\"2.0\",\"method\":\"fail\"}\n"
                "{\"jsonrpc\":\"2.0\",\"method\":\"subscribe\"}\n");
    client.send(echo);
    EXPECT_THAT(*client.line(), HasSubstr("\"id\":1"));
    EXPECT_EQ(sinks_.size(), 1U);
}

TEST_F(ControlServerTest, ALineOfSixtyFourKibibytesIsReadAndOneByteMoreIsRefused) {
    const std::string head = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"echo\",\"params\":{\"a\":\"";
    const auto line_of = [&](std::size_t bytes) { return head + std::string(bytes - head.size() - 4, 'x') + "\"}}\n"; };
    auto good = connect();
    good.send_all(line_of(limits::control_line_bytes_max));
    EXPECT_THAT(*good.line(), HasSubstr("result"));

    auto bad = connect();
    bad.send_all(line_of(limits::control_line_bytes_max + 1));
    const auto answer = bad.answer();
    EXPECT_EQ(answer.at("error").at("data").at("code").as_string(), "protocol_violation");
    EXPECT_TRUE(bad.is_closed());

    auto endless = connect();
    endless.send_all(std::string(limits::control_line_bytes_max, ' '));
    EXPECT_THAT(*endless.line(), HasSubstr("protocol_violation"));
    EXPECT_TRUE(endless.is_closed());
}

TEST_F(ControlServerTest, HalfALineAndSilenceEndsThatConnectionAlone) {
    auto silent = connect();
    auto neighbour = connect();
    silent.send("{\"jsonrpc\":");
    EXPECT_THAT(*silent.line(), HasSubstr("deadline_exceeded"));
    EXPECT_TRUE(silent.is_closed());
    neighbour.send(echo);
    EXPECT_THAT(*neighbour.line(), HasSubstr("result"));
}

TEST_F(ControlServerTest, AClientThatHasEndedSendingStillGetsItsAnswer) {
    auto client = connect();
    client.ask(1, "later");
    client.end_sending();
    ASSERT_TRUE(test::run_until(io_, [&] { return later_.size() == 1; }));
    EXPECT_TRUE(connect().call("echo").contains("result")) << "by now the end of what it sends is read";
    later_[0].answer(rpc::Answer{});
    EXPECT_THAT(client.line(), testing::Optional(HasSubstr("result")));
    EXPECT_TRUE(client.is_closed());
    EXPECT_TRUE(test::run_until(io_, [&] { return server_->connections() == 0; }));
}

TEST_F(ControlServerTest, AClientThatGoesWhileItsRequestIsUnderWayIsForgotten) {
    auto client = connect();
    client.ask(1, "later");
    ASSERT_TRUE(test::run_until(io_, [&] { return later_.size() == 1; }));
    client.close();
    ASSERT_TRUE(test::run_until(io_, [&] { return server_->connections() == 0; }));
    later_[0].answer(rpc::Answer{});  // to nobody
}

TEST_F(ControlServerTest, ASubscriberThatHasEndedSendingStaysUntilItGoes) {
    auto client = connect();
    client.ask(1, "subscribe");
    client.end_sending();
    EXPECT_THAT(*client.line(), HasSubstr("result"));
    sinks_[0].lock()->notify("{\"n\":1}\n");
    EXPECT_EQ(client.line(), "{\"n\":1}");
    client.close();
    EXPECT_TRUE(test::run_until(io_, [&] { return server_->connections() == 0 && sinks_[0].expired(); }));
}

TEST_F(ControlServerTest, ASlowReaderIsClosedWhenTooMuchWaitsForIt) {
    auto slow = connect();
    slow.ask(1, "subscribe");
    ASSERT_TRUE(test::run_until(io_, [&] { return sinks_.size() == 1; }));
    const std::string line = std::string(100'000, 'n') + "\n";
    for (int i = 0; i < 100 && !sinks_[0].expired(); ++i)
        if (const auto sink = sinks_[0].lock()) sink->notify(line);
    EXPECT_TRUE(test::run_until(io_, [&] { return server_->connections() == 0; }));
}

TEST_F(ControlServerTest, WhatTheClientHasReadNoLongerWaitsAndAnAnswerBeyondItsBoundIsAnErrorNotAFlood) {
    auto client = connect();
    constexpr std::size_t bytes = 100'000;
    for (std::size_t read = 0; read <= 2 * limits::control_outbox_bytes_max; read += bytes)
        ASSERT_TRUE(client.call("big", {{"bytes", bytes}}).contains("result")) << read;
    EXPECT_TRUE(client.call("big", {{"bytes", 1'000'000}}).contains("result"));
    EXPECT_EQ(client.call("big", {{"bytes", 2'000'000}}).at("error").at("data").at("code").as_string(),
              "resources_exhausted");
}

TEST_F(ControlServerTest, DescriptorsComeWithTheirAnswerAndAreNotLeaked) {
    auto client = connect();
    EXPECT_TRUE(client.call("echo").contains("result"));
    const std::size_t before = open_descriptors();
    for (int i = 0; i < 10; ++i) {
        EXPECT_TRUE(client.call("open").contains("result"));
        ASSERT_EQ(client.fds.size(), 1U);
        client.fds.clear();
    }
    client.send("{\"jsonrpc\":\"2.0\",\"method\":\"open\"}\n");  // a notification: nobody takes it
    EXPECT_TRUE(client.call("echo").contains("result"));
    EXPECT_EQ(open_descriptors(), before);
}

TEST_F(ControlServerTest, RequestsOfOneConnectionAreBounded) {
    auto client = connect();
    for (std::size_t i = 0; i < limits::control_requests_max; ++i) client.ask(1, "later");
    EXPECT_EQ(client.call("later").at("error").at("data").at("code").as_string(), "queue_full")
        << "and this answer does not wait for the others";
    for (auto& call : later_) call.answer(rpc::Answer{});
    EXPECT_EQ(later_.size(), limits::control_requests_max);
}

TEST_F(ControlServerTest, TenThousandConnectionsHurtNobody) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);

    auto first = connect();
    EXPECT_TRUE(first.call("echo").contains("result"));
    std::vector<UniqueFd> kept;
    std::size_t refused = 0;
    for (int i = 0; i < 10'000; ++i) {
        UniqueFd one = listener_.connect();
        ASSERT_TRUE(one);
        if (i < 2'000) kept.push_back(std::move(one));  // the rest go as they come
        if (i % 500 == 0) io_.restart(), io_.poll();
    }
    ASSERT_TRUE(test::run_until(io_, [&] { return server_->connections() == limits::control_connections_per_uid_max; }))
        << "the rest of control_connections_max is for other users";
    for (const UniqueFd& one : kept) {
        std::array<char, 512> text{};
        if (::recv(one.get(), text.data(), text.size() - 1, MSG_DONTWAIT) > 0 &&
            std::string_view{text.data()}.find("resources_exhausted") != std::string_view::npos)
            ++refused;
    }
    EXPECT_GE(refused, 900U);
    EXPECT_TRUE(first.call("echo").contains("result"));
    kept.clear();
    EXPECT_TRUE(test::run_until(io_, [&] { return server_->connections() == 1; }));
    EXPECT_TRUE(connect().call("echo").contains("result"));
}

TEST_F(ControlServerTest, RunningOutOfDescriptorsIsToldToTheClientAndPasses) {
    auto first = connect();
    EXPECT_TRUE(first.call("echo").contains("result"));
    auto second = connect();  // still in the backlog
    const auto told = [&] {
        const bulkhead::test::NoFreeDescriptor none;
        return second.line();
    }();
    ASSERT_TRUE(told);
    EXPECT_THAT(*told, HasSubstr("resources_exhausted"));
    EXPECT_TRUE(first.call("echo").contains("result"));
    EXPECT_TRUE(connect().call("echo").contains("result"));
}

TEST_F(ControlServerTest, FinishLetsTheLastAnswersLeave) {
    auto client = connect();
    EXPECT_TRUE(client.call("echo").contains("result"));
    bool finished = false;
    server_->finish([&] { finished = true; });
    EXPECT_TRUE(test::run_until(io_, [&] { return finished; }));
    client.send(echo);
    EXPECT_THAT(*client.line(), HasSubstr("result")) << "who is connected is served to the end";
}

}  // namespace
}  // namespace bulkhead::supervisor
