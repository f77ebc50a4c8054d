// Each field of each message that a client sends, out of range: one clear error, and no harm to anybody else. Which
// fields there are, and where, is read from wire.json: a field that is added there and not here fails the first test.

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <sstream>

#include "tests/unit/worker/loop_harness.h"

namespace bulkhead::worker::test {
namespace {

namespace json = boost::json;

/// What a value deserves.
enum class Outcome {
    served,     ///< the field is reserved, or any value is right
    refused,    ///< an error for this request alone
    told,       ///< an error without a request's number; the channel lives on
    ended,      ///< protocol_violation, then the end of this channel
    any_error,  ///< refused or ended: that depends on what was agreed
};

/// "message/struct.field", of values too long for 8 bytes their first ones.
struct Case {
    std::string field;
    std::vector<std::uint64_t> values;
    Outcome outcome;
};

constexpr std::uint64_t all_ones = ~std::uint64_t{0};
constexpr std::uint64_t unprintable = 0x1b;            // an escape, then the end of the text
constexpr std::uint64_t letters = 0x6161616161616161;  // the whole field is full of them

const std::vector<Case>& cases() {
    using enum Outcome;
    static const std::vector<Case> all{
        {"infer/Header.magic", {0, 0x4B48'3142, all_ones}, ended},
        {"infer/Header.version", {0, 2, all_ones}, ended},
        // Messages of the worker, of nobody, and with bodies of other sizes.
        {"infer/Header.type", {0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, all_ones}, ended},
        {"infer/Header.size_bytes", {0, 31, 32, 335, 337, all_ones}, ended},
        {"infer/Header.flags", {1, 2, 0xffff'fffc, all_ones}, served},
        {"infer/Header.request_id", {0}, ended},
        {"infer/Header.reserved", {1, all_ones}, served},

        {"hello/Hello.version_min", {2, all_ones}, ended},
        {"hello/Hello.version_max", {0}, ended},
        {"hello/Hello.reserved0", {1, all_ones}, served},
        {"hello/Hello.features", {std::uint64_t{1} << 40, std::uint64_t{1} << 63}, served},
        {"hello/Hello.client", {unprintable, letters}, ended},
        {"hello/Hello.gpu", {1, all_ones}, served},

        {"slab_request/SlabRequest.direction", {0, 3, all_ones}, refused},
        {"slab_request/SlabRequest.kind", {0, 2, 3, 4, all_ones}, refused},
        {"slab_request/SlabRequest.reserved0", {1, all_ones}, served},
        {"slab_request/SlabRequest.size_bytes", {0, std::uint64_t{1} << 40, std::uint64_t{1} << 63, all_ones}, refused},
        {"slab_request/SlabRequest.reserved", {1, all_ones}, served},

        {"infer/Infer.method", {0, unprintable, letters, 'z'}, refused},
        {"infer/Infer.deadline_ms", {0, 60'000, all_ones}, served},
        {"infer/Infer.tensor_count", {0, 2, 33, all_ones}, ended},
        {"infer/Infer.reserved0", {1, all_ones}, served},
        {"infer/Infer.json_bytes", {1, 48 * 1024 + 1, all_ones}, ended},
        {"infer/Infer.reserved1", {1, all_ones}, served},

        {"infer/TensorDescriptor.name", {0, unprintable, letters, 'z'}, refused},
        {"infer/TensorDescriptor.dtype", {0, 5, 13, all_ones}, refused},
        {"infer/TensorDescriptor.rank", {0, 2, 8, 9, all_ones}, refused},
        {"infer/TensorDescriptor.flags", {1, all_ones}, served},
        {"infer/TensorDescriptor.event_id", {1, all_ones}, refused},
        {"infer/TensorDescriptor.lease", {}, served},  // its fields follow
        {"infer/TensorDescriptor.dims", {0, 3, 5, std::uint64_t{1} << 31, std::uint64_t{1} << 62, all_ones}, refused},
        {"infer/TensorDescriptor.strides", {0, 2, std::uint64_t{1} << 62, all_ones}, refused},
        {"infer/LeaseRef.slab_id", {77, 0x8000'0000, all_ones}, refused},
        {"infer/LeaseRef.event_id", {1, all_ones}, served},  // a release's alone
        {"infer/LeaseRef.offset_bytes", {1, 32, 64 * 1024, std::uint64_t{1} << 63, all_ones - 63}, refused},
        {"infer/LeaseRef.size_bytes", {0, 15, 17, std::uint64_t{1} << 62, all_ones}, refused},
        {"infer/LeaseRef.generation", {0}, refused},

        {"release/Release.count", {0, 2, 1025, all_ones}, ended},
        {"release/Release.reserved", {1, all_ones}, served},
        {"release/LeaseRef.slab_id", {1, 77, 0x8000'0000, all_ones}, told},
        {"release/LeaseRef.event_id", {1, all_ones}, told},
        {"release/LeaseRef.offset_bytes", {1, 64, 64 * 1024, all_ones}, told},
        {"release/LeaseRef.size_bytes", {0, 15, 64, all_ones}, told},
        {"release/LeaseRef.generation", {0, 77, all_ones}, told},

        // Without a descriptor, and where lending was not agreed: nothing that these may say is right.
        {"slab_lend/SlabLend.slab_id", {0, 1, 0x7fff'ffff, all_ones}, any_error},
        {"slab_lend/SlabLend.kind", {0, 4, all_ones}, any_error},
        {"slab_lend/SlabLend.reserved0", {1, all_ones}, any_error},
        {"slab_lend/SlabLend.size_bytes", {0, all_ones}, any_error},
        {"slab_lend/SlabLend.reserved", {1, all_ones}, any_error},
        {"slab_return/SlabName.slab_id", {0, 77, 0x8000'0000, all_ones}, any_error},
        {"slab_return/SlabName.reserved", {1, all_ones}, any_error},
    };
    return all;
}

/// What wire.json says of the structs.
class Layout {
public:
    Layout() {
        std::ifstream file{BULKHEAD_SOURCE_DIR "/ipc/channel/wire.json"};
        structs_ = json::parse(std::string{std::istreambuf_iterator<char>{file}, {}}).at("structs").as_object();
    }
    struct Field {
        std::size_t offset = 0;
        std::size_t bytes = 0;
    };
    [[nodiscard]] std::map<std::string, Field> fields(const std::string& name) const {
        std::map<std::string, Field> all;
        std::size_t offset = 0;
        for (const json::value& field : structs_.at(name).at("fields").as_array()) {
            const std::size_t bytes = size_of(std::string{field.at(1).as_string()});
            all[std::string{field.at(0).as_string()}] = {offset, bytes};
            offset += bytes;
        }
        return all;
    }

private:
    std::size_t size_of(const std::string& type) const {
        static const std::map<std::string, std::size_t> sizes{{"u8", 1},  {"u16", 2}, {"u32", 4},
                                                              {"u64", 8}, {"i64", 8}, {"char", 1}};
        const std::size_t bracket = type.find('[');
        const std::string base = type.substr(0, bracket);
        const std::size_t one =
            sizes.contains(base) ? sizes.at(base) : static_cast<std::size_t>(structs_.at(base).at("size").as_int64());
        return bracket == std::string::npos ? one : one * std::stoul(type.substr(bracket + 1));
    }
    json::object structs_;
};

/// The structs of each message, in their order in the packet.
const std::map<std::string, std::vector<std::string>>& messages() {
    static const std::map<std::string, std::vector<std::string>> all{
        {"hello", {"Header", "Hello"}},
        {"slab_request", {"Header", "SlabRequest"}},
        {"infer", {"Header", "Infer", "TensorDescriptor", "LeaseRef"}},
        {"release", {"Header", "Release", "LeaseRef"}},
        {"slab_lend", {"Header", "SlabLend"}},
        {"slab_return", {"Header", "SlabName"}},
    };
    return all;
}

template <typename Body>
void append(std::vector<std::byte>& packet, const Body& body) {
    const auto bytes = std::as_bytes(std::span{&body, 1});
    packet.insert(packet.end(), bytes.begin(), bytes.end());
}

class ChannelFields : public LoopTest {
protected:
    static constexpr std::uint64_t request_id = 7;

    /// A good message of this name. `held` is an output that the client may give back.
    static std::vector<std::byte> good(const std::string& message, const TestClient& client,
                                       const wire::LeaseRef& held) {
        std::vector<std::byte> packet(sizeof(wire::Header));
        wire::Header header{wire::magic, wire::version, 0, 0, 0, request_id, 0};
        if (message == "hello") {
            header.type = static_cast<std::uint16_t>(wire::MessageType::hello);
            wire::Hello body{};
            body.version_min = body.version_max = wire::version;
            std::memcpy(body.client.data(), "fields", 6);
            append(packet, body);
        } else if (message == "slab_request") {
            header.type = static_cast<std::uint16_t>(wire::MessageType::slab_request);
            append(packet, wire::SlabRequest{1, 1, 0, 4096, 0});
        } else if (message == "infer") {
            header.type = static_cast<std::uint16_t>(wire::MessageType::infer);
            wire::Infer body{};
            std::memcpy(body.method.data(), "echo", 4);
            body.tensor_count = 1;
            append(packet, body);
            wire::TensorDescriptor tensor{};
            tensor.name[0] = 'x';
            tensor.dtype = static_cast<std::uint8_t>(wire::DType::float32);
            tensor.rank = 1;
            tensor.dims[0] = 4;
            tensor.strides[0] = 1;
            tensor.lease.slab_id = client.find_slab(wire::SlabDirection::input)->offer.slab_id;
            tensor.lease.size_bytes = 16;
            tensor.lease.generation = 1;
            append(packet, tensor);
        } else if (message == "release") {
            header.type = static_cast<std::uint16_t>(wire::MessageType::release);
            append(packet, wire::Release{1, 0});
            append(packet, held);
        } else if (message == "slab_lend") {
            header.type = static_cast<std::uint16_t>(wire::MessageType::slab_lend);
            append(packet, wire::SlabLend{wire::lent_slab_id_min, 1, 0, 4096, 0});
        } else {
            header.type = static_cast<std::uint16_t>(wire::MessageType::slab_return);
            append(packet, wire::SlabName{wire::lent_slab_id_min, 0});
        }
        header.size_bytes = static_cast<std::uint32_t>(packet.size());
        std::memcpy(packet.data(), &header, sizeof header);
        return packet;
    }

    /// Where a field of a struct lies in the packet of a message.
    [[nodiscard]] Layout::Field find(const std::string& message, const std::string& name,
                                     const std::string& field) const {
        const std::map<std::string, std::size_t> begins{
            {"Header", 0},
            {"TensorDescriptor", sizeof(wire::Header) + sizeof(wire::Infer)},
            {"LeaseRef", message == "release"
                             ? sizeof(wire::Header) + sizeof(wire::Release)
                             : sizeof(wire::Header) + sizeof(wire::Infer) + offsetof(wire::TensorDescriptor, lease)}};
        const Layout::Field in_struct = layout.fields(name).at(field);
        const auto begin = begins.find(name);
        return {(begin == begins.end() ? sizeof(wire::Header) : begin->second) + in_struct.offset, in_struct.bytes};
    }

    /// One client sends one wrong value; what it hears is what the value deserves.
    void try_value(const Case& each, std::uint64_t value) {
        const std::string message = each.field.substr(0, each.field.find('/'));
        const std::string rest = each.field.substr(message.size() + 1);
        const std::size_t dot = rest.find('.');
        const Layout::Field field = find(message, rest.substr(0, dot), rest.substr(dot + 1));

        TestClient client = introduce();
        wire::LeaseRef held{};
        if (message != "hello") {
            client.open();
            client.infer(1, "echo", {client.tensor({1, 2, 3, 4})});
            held = client.expect_result(1).tensors[0].lease;
        }
        std::vector<std::byte> packet = good(message, client, held);
        std::memcpy(packet.data() + field.offset, &value, std::min<std::size_t>(field.bytes, sizeof value));
        if (value == letters) std::memset(packet.data() + field.offset, 'a', field.bytes);
        client.send(packet);
        switch (each.outcome) {
        case Outcome::served: return expect_served(client, message);
        case Outcome::refused: expect_story(client, request_id); return expect_lives(client);
        case Outcome::told: expect_story(client, 0); return expect_lives(client);
        case Outcome::ended: expect_story(client, 0); return client.expect_end();
        case Outcome::any_error: {
            const auto answer = client.receive_answer();
            ASSERT_TRUE(answer && std::holds_alternative<channel::Failure>(*answer));
            const auto& failure = std::get<channel::Failure>(*answer);
            EXPECT_FALSE(failure.error.attempt.empty());
            EXPECT_TRUE(failure.request_id == 0 || failure.request_id == request_id);
            return;
        }
        }
    }
    void expect_served(TestClient& client, const std::string& message) {
        if (message == "hello") {
            const auto welcome = client.receive();
            ASSERT_TRUE(welcome && std::holds_alternative<channel::Welcome>(*welcome));
            for (int i = 0; i < std::get<channel::Welcome>(*welcome).slab_count; ++i) ASSERT_TRUE(client.receive());
        } else if (message == "slab_request") {
            const auto offer = client.receive();
            ASSERT_TRUE(offer && std::holds_alternative<channel::SlabOffer>(*offer));
        } else if (message == "infer") {
            client.expect_result(request_id);
        }
        expect_lives(client);
    }
    /// One error, which says what was wrong.
    static void expect_story(TestClient& client, std::uint64_t of_request) {
        const auto answer = client.receive_answer();
        ASSERT_TRUE(answer) << "the end came without a word";
        ASSERT_TRUE(std::holds_alternative<channel::Failure>(*answer)) << "it was answered as if it were right";
        const auto& failure = std::get<channel::Failure>(*answer);
        EXPECT_EQ(failure.request_id, of_request) << failure.error.text();
        EXPECT_FALSE(failure.error.attempt.empty());
        EXPECT_NE(failure.error.code, ErrorCode::internal) << failure.error.text();
        if (of_request == 0) {
            EXPECT_EQ(failure.error.code, ErrorCode::protocol_violation) << failure.error.text();
        }
    }
    /// The very next thing that it hears is the answer to its next request: there was one error, or none.
    static void expect_lives(TestClient& client) {
        client.infer(99, "echo", {client.tensor({1}, 4096, 9)});
        client.expect_result(99);
    }

    const Layout layout;
};

TEST_F(ChannelFields, EachOneOfWireJsonIsTried) {
    std::set<std::string> tried;
    for (const Case& each : cases()) tried.insert(each.field);
    for (const auto& [message, structs] : messages())
        for (const std::string& name : structs)
            for (const auto& [field, place] : layout.fields(name)) {
                if (name == "Header" && message != "infer") continue;  // one and the same
                EXPECT_TRUE(tried.contains(message + "/" + name + "." + field))
                    << message << "/" << name << "." << field;
            }
}

TEST_F(ChannelFields, OutOfRangeIsOneClearErrorAndTheNeighbourNeverNotices) {
    start_ready();
    TestClient neighbour = open_channel();
    std::uint64_t request = 0;
    for (const Case& each : cases())
        for (const std::uint64_t value : each.values) {
            std::ostringstream trace;
            trace << each.field << " = 0x" << std::hex << value;
            SCOPED_TRACE(trace.str());

            try_value(each, value);

            neighbour.infer(++request, "echo", {neighbour.tensor({5})});
            EXPECT_EQ(neighbour.values(neighbour.expect_result(request).tensors.at(0)), (std::vector<float>{5}));
            if (HasFatalFailure()) return;
        }
}

}  // namespace
}  // namespace bulkhead::worker::test
