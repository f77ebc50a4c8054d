/// The C++ clients in the hands of tests in Python: `channel_player blocking|async`. Standard input
/// is a packet socket; each packet is a command of test_client_conformance.py, and is answered by
/// one: `ok …`, `more …`, or an error's code and words.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ipc/base/packet.h"
#include "tests/support/clients/both_clients.h"

namespace bulkhead::test {
namespace {

using Words = std::vector<std::string>;

template <typename C>
class Player {
public:
    Result<std::string> play(const Words& words, std::vector<UniqueFd> fds) {
        const std::string &verb = words.at(0), &name = words.size() > 1 ? words[1] : verb;
        if (verb == "open") {
            ChannelOptions options{.client = "player", .deadline = std::chrono::seconds{10}};
            if (words.size() > 2) options.deadline = std::chrono::milliseconds{std::stol(words[2])};
            Result<C> channel = C::adopt(std::move(fds.at(0)), options);
            if (!channel) return channel.error();
            channels_.erase(name);
            const C& opened = channels_.emplace(name, std::move(*channel)).first->second;
            return fmt::format(" {} {}", opened.model(), opened.generation());
        }
        if (verb == "new" || verb == "put") {
            const bool filled = verb == "put";
            const std::array<std::int64_t, 1> dims{filled ? static_cast<std::int64_t>(words.size()) - 3 : std::stol(words.at(3))};
            Result<Input> input = channels_.at(name).allocate(wire::DType::float32, dims);
            if (!input) return input.error();
            for (std::size_t i = 3; filled && i < words.size(); ++i) input->template as<float>()[i - 3] = std::stof(words[i]);
            inputs_.insert_or_assign(words.at(2), std::move(*input));
            return "";
        }
        if (verb == "ask") {
            const auto output = replies_.find(words.at(3));
            const NamedInput x = output != replies_.end() ? NamedInput{"x", &output->second.outputs.at(0)}
                                                          : NamedInput{"x", &inputs_.at(words[3])};
            Request request{.inputs = {&x, 1}};
            for (std::size_t i = 4; i < words.size(); ++i) {
                if (words[i] == "parts")
                    request.in_parts = true;
                else
                    request.deadline = std::chrono::milliseconds{std::stol(words[i])};
            }
            asked_.insert_or_assign(words.at(2), Asked{name, channels_.at(name).submit(request), request.in_parts});
            return "";
        }
        if (verb == "get") {
            const Asked& asked = asked_.at(name);
            if (!asked.number) return asked.number.error();
            C& channel = channels_.at(asked.channel);
            Result<Reply> reply = asked.in_parts ? channel.next(*asked.number) : channel.wait(*asked.number);
            if (!reply) return reply.error();
            return read(replies_.insert_or_assign(name, std::move(*reply)).first->second);
        }
        if (verb == "read") return read(replies_.at(name));
        if (verb == "cancel") return said(channels_.at(asked_.at(name).channel).cancel(asked_.at(name).number.value()));
        if (verb == "leave") channels_.at(asked_.at(name).channel).abandon(asked_.at(name).number.value());
        if (verb == "drop") inputs_.erase(name), replies_.erase(name);
        if (verb == "close") channels_.erase(name);
        if (verb == "reset") replies_.clear(), inputs_.clear(), asked_.clear(), channels_.clear();
        return "";
    }

private:
    struct Asked {
        std::string channel;
        Result<std::uint64_t> number;
        bool in_parts;
    };
    static Result<std::string> said(const Result<>& done) {
        if (!done) return done.error();
        return "";
    }
    static std::string read(const Reply& reply) {
        std::string text = reply.more ? "+" : "";
        for (const Output& output : reply.outputs)
            for (const float value : output.as<float>()) text += fmt::format(" {:g}", value);
        return text;
    }

    std::map<std::string, C> channels_;
    std::map<std::string, Input> inputs_;
    std::map<std::string, Asked> asked_;
    std::map<std::string, Reply> replies_;
};

template <typename C>
int run() {
    Player<C> player;
    std::vector<std::byte> buffer(packet_bytes_max);
    Packet packet;
    while (receive_packet(STDIN_FILENO, buffer, packet).value() == ReceiveOutcome::packet) {
        std::istringstream text{std::string{reinterpret_cast<const char*>(packet.bytes.data()), packet.bytes.size()}};
        Words words;
        for (std::string word; text >> word;) words.push_back(word);
        const Result<std::string> done = player.play(words, std::move(packet.fds));
        const std::string answer = !done ? fmt::format("{} {}", to_string(done.error().code), done.error().text())
                                   : done->starts_with('+') ? "more" + done->substr(1)
                                                            : "ok" + *done;
        if (!send_packet(STDIN_FILENO, answer)) return 1;
    }
    return 0;
}

}  // namespace
}  // namespace bulkhead::test

int main(int argc, char** argv) {
    using namespace bulkhead;
    return argc == 2 && std::string_view{argv[1]} == "async" ? test::run<test::SteppedChannel>() : test::run<Channel>();
}
