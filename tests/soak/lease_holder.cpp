// lease_holder SOCKET MODEL: clients that are there to be killed. For each byte on stdin it forks one, which opens a
// channel and holds input and output leases with a request in flight, for ever. On stdout come records: 'b' and the
// client's pid, 'h' once it holds leases, 'x' and a text's size and the text where something was wrong, 'e' when it has
// ended.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>

#include "clients/cpp/channel.h"

using namespace bulkhead;

namespace {

void tell(char what, std::int32_t number = 0, const std::string& text = {}) {
    std::string record(1, what);
    record.append(reinterpret_cast<const char*>(&number), sizeof number);
    record += text;
    if (::write(1, record.data(), record.size()) < 0) ::_exit(1);  // up to PIPE_BUF at once, or not at all
}

[[noreturn]] void wrong(const std::string& what) {
    tell('x', static_cast<std::int32_t>(std::min<std::size_t>(what.size(), 1024)), what.substr(0, 1024));
    ::_exit(1);
}

template <typename T>
T must(Result<T> result) {
    if (!result) wrong(result.error().text());
    return std::move(*result);
}

/// Never returns: it is killed.
[[noreturn]] void hold_leases(const char* socket, const char* model) {
    ControlClient control = must(ControlClient::connect(socket));
    ChannelOptions options;
    options.client = "lease_holder";
    Channel channel = must(Channel::open(control, model, options));
    const std::array<std::int64_t, 1> dims{512};
    Input held = must(channel.allocate(wire::DType::float32, dims));
    Input input = must(channel.allocate(wire::DType::float32, dims));
    const NamedInput named{"x", &input};
    Request request;
    request.inputs = {&named, 1};
    std::deque<Output> outputs;
    for (std::int64_t round = 0;; ++round) {
        const auto mark = static_cast<float>(round % 4096);
        std::ranges::fill(input.as<float>(), mark);
        const std::uint64_t sent = must(channel.submit(request));
        if (round == 2) tell('h');
        Reply reply = must(channel.wait(sent));
        for (Output& output : reply.outputs) {
            if (output.as<float>().back() != mark) wrong("a wrong answer");
            outputs.push_back(std::move(output));
        }
        if (outputs.size() > 8) outputs.pop_front();
    }
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 3) return 2;
    for (char next = 0; ::read(0, &next, 1) == 1;) {
        const pid_t client = ::fork();
        if (client == 0) hold_leases(argv[1], argv[2]);
        tell('b', client);
        ::waitpid(client, nullptr, 0);
        tell('e');
    }
}
