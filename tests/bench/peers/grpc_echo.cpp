// grpc_echo server SOCKET | client SOCKET BYTES ANSWER_BYTES: gRPC's unary call over a Unix socket,
// a baseline of the channel bench. The client's payload is made once and sent again and again, as
// the others do.

#include <algorithm>
#include <string>

#include <grpcpp/grpcpp.h>

#include "echo.grpc.pb.h"
#include "tests/bench/peers/rounds.h"

namespace {

class Echo final : public bulkhead::bench::Echo::Service {
    grpc::Status Exchange(grpc::ServerContext* /*context*/, const bulkhead::bench::Payload* request,
                          bulkhead::bench::Payload* answer) override {
        const std::string& data = request->data();
        answer->set_data(data.data(), std::min<std::size_t>(data.size(), request->answer_bytes()));
        return grpc::Status::OK;
    }
};

int serve(const std::string& address) {
    Echo echo;
    grpc::ServerBuilder builder;
    builder.SetMaxReceiveMessageSize(-1);
    builder.SetMaxSendMessageSize(-1);
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(&echo);
    const auto server = builder.BuildAndStart();
    if (!server) return 1;
    server->Wait();
    return 0;
}

int ask(const std::string& address, std::size_t bytes, std::uint64_t answer_bytes) {
    grpc::ChannelArguments unbounded;
    unbounded.SetMaxReceiveMessageSize(-1);
    unbounded.SetMaxSendMessageSize(-1);
    const auto stub = bulkhead::bench::Echo::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), unbounded));
    bulkhead::bench::Payload question;
    question.set_data(std::string(bytes, '\1'));
    question.set_answer_bytes(answer_bytes);
    return bulkhead::bench::serve_rounds(3, [&]() -> std::string {
        grpc::ClientContext context;
        context.set_wait_for_ready(true);
        bulkhead::bench::Payload answer;
        const grpc::Status status = stub->Exchange(&context, question, &answer);
        if (!status.ok()) return status.error_message();
        return answer.data().empty() || answer.data().back() != '\1' ? "a wrong answer" : "";
    });
}

}  // namespace

int main(int argc, char** argv) {
    const std::string role = argc > 2 ? argv[1] : "";
    if (role == "server" && argc == 3) return serve("unix:" + std::string{argv[2]});
    if (role == "client" && argc == 5)
        return ask("unix:" + std::string{argv[2]}, std::stoull(argv[3]), std::stoull(argv[4]));
    return std::fprintf(stderr, "usage: %s server SOCKET | client SOCKET BYTES ANSWER_BYTES\n", argv[0]), 2;
}
