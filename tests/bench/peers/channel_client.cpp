// channel_client SOCKET MODEL BYTES rings|seqpacket: a C++ client of the channel bench. Its payload
// is filled once and sent again and again; each answer is looked at and given back.

#include <cstring>

#include "bulkhead/channel.h"
#include "tests/bench/peers/rounds.h"

using namespace bulkhead;

int main(int argc, char** argv) {
    if (argc != 5) return std::fprintf(stderr, "usage: %s SOCKET MODEL BYTES rings|seqpacket\n", argv[0]), 2;
    const std::int64_t bytes = std::stoll(argv[3]);
    auto control = ControlClient::connect(argv[1]);
    if (!control) return bench::refuse_rounds(control.error().text());
    ChannelOptions options;
    options.client = "bench";
    options.rings = argv[4] != std::string{"seqpacket"};
    auto channel = Channel::open(*control, argv[2], options);
    if (!channel) return bench::refuse_rounds(channel.error().text());
    auto input = channel->allocate(wire::DType::uint8, std::span{&bytes, 1});
    if (!input) return bench::refuse_rounds(input.error().text());
    std::memset(input->bytes().data(), 1, input->bytes().size());

    const NamedInput named{"x", &*input};
    Request request;
    request.inputs = {&named, 1};
    return bench::serve_rounds(3, [&]() -> std::string {
        const auto reply = channel->infer(request);
        if (!reply) return reply.error().text();
        if (reply->outputs.size() != 1 || reply->outputs[0].bytes().back() != std::byte{1}) return "a wrong answer";
        return {};
    });
}
