#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <map>

#include <boost/json.hpp>
#include <fmt/format.h>
#include <gmock/gmock.h>

#include "tests/unit/worker/generation_fixture.h"
#include "worker/file/sha256.h"
#include "worker/generation/models/fit.h"
#include "worker/generation/models/package.h"
#include "worker/generation/models/weights_file.h"

namespace bulkhead::worker::generation::test {
namespace {

using testing::HasSubstr;

/// A copy of the tiny package, to be broken.
class GenerationPackage : public testing::Test {
protected:
    void SetUp() override {
        SKIP_WITHOUT(tiny_package());
        std::filesystem::copy(tiny_package(), package_);
        manifest_ = boost::json::parse(worker::test::contents(package_ / "manifest.json")).as_object();
    }

    Result<std::unique_ptr<Model>> load_it() {
        worker::test::write_file(package_ / "manifest.json", boost::json::serialize(manifest_));
        return load(generate_spec(package_), folder_.path() / "cache");
    }
    void expect_refused(ErrorCode code, const std::string& words) {
        const auto loaded = load_it();
        ASSERT_FALSE(loaded) << "expected " << words;
        EXPECT_EQ(loaded.error().code, code) << loaded.error().text();
        EXPECT_THAT(loaded.error().text(), HasSubstr(words));
        EXPECT_THAT(loaded.error().remedy, HasSubstr("python -m bulkhead.export"));
    }
    /// Rewrites the header of the weights; what follows it stays.
    void edit_header(const std::function<void(boost::json::object&)>& edit) {
        const auto file = package_ / "weights.safetensors";
        std::string bytes = worker::test::contents(file);
        std::uint64_t length = 0;
        std::memcpy(&length, bytes.data(), sizeof length);
        const std::size_t data_begins = 8 + length;
        boost::json::object header = boost::json::parse(bytes.substr(8, length)).as_object();
        edit(header);
        std::string text = boost::json::serialize(header);
        text.resize((text.size() + 7) / 8 * 8, ' ');
        length = text.size();
        std::string out(8, '\0');
        std::memcpy(out.data(), &length, sizeof length);
        out += text + bytes.substr(data_begins);
        worker::test::write_file(file, out);
        manifest_["weights"].as_object()["bytes"] = out.size();
        manifest_["weights"].as_object()["sha256"] = sha256_of(out);
    }
    static std::string sha256_of(std::string_view bytes) {
        Sha256 hash;
        hash.update(std::as_bytes(std::span{bytes}));
        return hash.hex();
    }
    worker::test::TemporaryFolder folder_;
    std::filesystem::path package_ = folder_.path() / "package";
    boost::json::object manifest_;
};

TEST_F(GenerationPackage, WeightsThatAreNoFileAreRefusedAndNotWaitedFor) {
    const auto weights = package_ / "weights.safetensors";
    std::filesystem::remove(weights);
    ASSERT_EQ(::mkfifo(weights.c_str(), 0600), 0);
    const auto loaded = load_it();
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::load_failed);
    EXPECT_THAT(loaded.error().text(), HasSubstr("not a regular file"));
    const auto mapped = WeightsFile::open(weights, 100);
    ASSERT_FALSE(mapped);
    EXPECT_THAT(mapped.error().text(), HasSubstr("not a regular file"));
}

TEST_F(GenerationPackage, WeightsAreTheSameInHugePages) {
    const auto path = package_ / "weights.safetensors";
    auto weights = WeightsFile::open(path, std::filesystem::file_size(path)).value();
    if (!HugePages::reserve(1)) GTEST_SKIP() << "the kernel gives no huge pages";
    std::map<std::string, std::pair<const std::byte*, std::vector<std::byte>>, std::less<>> before;
    for (const auto& [name, tensor] : weights.tensors())
        before[name] = {tensor.bytes.data(), {tensor.bytes.begin(), tensor.bytes.end()}};
    ASSERT_FALSE(before.empty());
    weights.copy_to_huge_pages(2, [](std::uint64_t /*done*/) { return false; });
    for (const auto& [name, tensor] : weights.tensors())
        EXPECT_EQ(tensor.bytes.data(), before.at(name).first) << "no room: they stay where they are";
    std::uint64_t done = 0;
    weights.copy_to_huge_pages(2, [&](std::uint64_t bytes) {
        done = bytes;
        return true;
    });
    EXPECT_EQ(done, weights.size_bytes());
    const WeightsFile moved = std::move(weights);
    for (const auto& [name, tensor] : moved.tensors()) {
        const auto& [address, bytes] = before.at(name);
        EXPECT_NE(tensor.bytes.data(), address) << name;
        EXPECT_TRUE(std::ranges::equal(tensor.bytes, bytes)) << name;
    }
}

TEST_F(GenerationPackage, LoadsWhole) {
    const auto loaded = load_it().value();
    EXPECT_NE(loaded->generator(), nullptr);
    EXPECT_TRUE(loaded->methods().empty());
    EXPECT_FALSE(loaded->writes_inputs()) << "its functions write keys and values, and no prompt";
}

TEST_F(GenerationPackage, WithoutPrefillReadsPromptsStepByStep) {
    const auto whole = load_it().value();
    std::mt19937 random{3};
    const Wish wish{random_prompt(random, whole->generator()->shape(), 9), 6};
    const auto expected = run_alone(*whole->generator(), wish);
    manifest_["prefill"] = nullptr;
    const auto slow = load_it().value();
    EXPECT_EQ(run_alone(*slow->generator(), wish), expected);
}

TEST_F(GenerationPackage, ManifestThatIsNoneIsToldWithItsField) {
    worker::test::write_file(package_ / "manifest.json", "{\"format\": ");
    auto loaded = load(generate_spec(package_), folder_.path() / "cache");
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::package_incompatible);

    std::filesystem::remove(package_ / "manifest.json");
    loaded = load(generate_spec(package_), folder_.path() / "cache");
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::load_failed);
    EXPECT_THAT(loaded.error().text(), HasSubstr("manifest.json"));
}

TEST_F(GenerationPackage, FieldsOutOfRangeAreNamed) {
    const auto original = manifest_;
    const auto refused = [&](const char* field, boost::json::value value) {
        manifest_ = original;
        manifest_[field] = std::move(value);
        expect_refused(ErrorCode::package_incompatible, std::string{"\""} + field);
    };
    refused("format", "bulkhead-generate/2");
    refused("vocabulary", 0);
    refused("vocabulary", "many");
    refused("unheard_of", 1);
    refused("exporter", 1);
    refused("slots", 100);
    refused("kv", boost::json::object{{"layers", 1}});
    refused("decode", boost::json::array{});
    refused("stop", boost::json::array{512});
    refused("delay_pattern", boost::json::object{{"bos", 600}, {"eos", 1}});
    for (const char* member : {"stop", "rope_delta", "first_token", "source"}) {
        manifest_ = original;
        manifest_.erase(member);
        expect_refused(ErrorCode::package_incompatible, std::string{"\""} + member + "\" is missing");
    }
}

TEST_F(GenerationPackage, WhatContradictsThisMachineOrTheFunctionsIsRefused) {
    const auto original = manifest_;
    const auto refused = [&](const char* words, const std::function<void()>& edit) {
        manifest_ = original;
        edit();
        expect_refused(ErrorCode::package_incompatible, words);
    };
    const auto object = [&](const char* name) -> boost::json::object& { return manifest_[name].as_object(); };
    refused("decode[0].file", [&] { manifest_["decode"].at(0).as_object()["file"] = "../decode.pt2"; });
    refused("a function for 2 sequences", [&] {
        boost::json::object first = manifest_["decode"].at(0).as_object(), last = first;
        first["sequences"] = boost::json::array{1, 1};
        last["sequences"] = boost::json::array{3, 64};
        manifest_["decode"] = {first, last};
    });
    refused("tensors", [&] { object("kv")["layers"] = 3; });
    refused("trying a step", [&] { object("kv")["heads"] = object("kv").at("heads").to_number<int>() * 2; });
    refused("logits", [&] { manifest_["vocabulary"] = manifest_["vocabulary"].to_number<int>() + 1; });
    refused("1.13.0", [&] { manifest_["torch"] = "1.13.0"; });
    refused("cuda", [&] {
        manifest_["device"] = "cuda";
        manifest_["compute_capability"] = "90";
    });
    refused("flag_of_2040", [&] { manifest_["cpu_flags"].as_array().emplace_back("flag_of_2040"); });
    std::filesystem::resize_file(package_ / "weights.safetensors", 1000);
    refused("1000 bytes", [] {});
    refused("weights", [&] { object("weights")["bytes"] = 1000; });
}

TEST_F(GenerationPackage, OnAGpuPrefillMustBeThere) {
    manifest_["device"] = "cuda";
    manifest_["compute_capability"] = "90";
    const auto refusal = [&]() -> Error {
        worker::test::write_file(package_ / "manifest.json", boost::json::serialize(manifest_));
        LoadContext context;
        context.cache = folder_.path() / "cache";
        const auto package = Package::open(generate_spec(package_), context);
        if (!package) return package.error();
        const auto checked = package->check(Machine::here("cuda", "90"));
        return checked ? Error{} : checked.error();
    };
    EXPECT_THAT(refusal().text(), testing::Not(HasSubstr("prefill\"")));
    manifest_["prefill"] = nullptr;
    const Error refused = refusal();
    EXPECT_EQ(refused.code, ErrorCode::package_incompatible) << refused.text();
    EXPECT_THAT(refused.attempt, HasSubstr("it has no \"prefill\""));
    EXPECT_THAT(refused.remedy, HasSubstr("python -m bulkhead.export"));
}

TEST_F(GenerationPackage, SlotsThatAGpuCouldNotWriteInPlaceAreRefusedBeforeAnythingIsLoaded) {
    manifest_["device"] = "cuda";
    manifest_["compute_capability"] = "90";
    boost::json::object& kv = manifest_["kv"].as_object();
    kv["heads"] = kv["dim"] = 3;  // 36 bytes a position
    manifest_["slots"] = 2;
    manifest_["length"] = 18;
    const auto loaded = load_it();
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::config_invalid) << loaded.error().text();
    EXPECT_THAT(loaded.error().text(), HasSubstr("take 648 bytes (18 positions of 36)"));
}

TEST_F(GenerationPackage, DefaultsThatNoRequestMayHaveAreRefused) {
    const auto original = manifest_["sampling"].as_object();
    const auto refused = [&](const char* name, boost::json::value value) {
        manifest_["sampling"] = original;
        manifest_["sampling"].as_object()[name] = std::move(value);
        expect_refused(ErrorCode::package_incompatible, std::string{"\""} + name + "\"");
    };
    refused("temperature", -3);
    refused("temprature", 1);
    refused("max_new_tokens", 0);
    manifest_["sampling"] = {{"do_sample", false}, {"temperature", 0.6}, {"top_k", nullptr}, {"max_new_tokens", 1000}};
    const auto loaded = load_it();
    EXPECT_TRUE(loaded) << loaded.error().text();
}

TEST_F(GenerationPackage, ShortestLengthLoadsAndTrialStepsAreNotCounted) {
    auto spec = generate_spec(package_);
    spec.generate.length = 3;
    const auto loaded = load(spec, folder_.path() / "cache").value();
    EXPECT_TRUE(loaded->generator()->counters().at("buckets").as_array().empty());
}

TEST_F(GenerationPackage, MissingFunctionIsNamed) {
    std::filesystem::remove(package_ / "prefill.pt2");
    const auto loaded = load_it();
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::load_failed);
    EXPECT_THAT(loaded.error().text(), HasSubstr("prefill.pt2"));
}

TEST_F(GenerationPackage, FilesThatAreNotTheManifestsAreRefused) {
    const auto changed = [&](const char* name, const std::function<std::size_t(const std::string&)>& place) {
        const auto file = package_ / name;
        const std::string whole = worker::test::contents(file);
        std::string bytes = whole;
        bytes.at(place(whole)) ^= 1;
        worker::test::write_file(file, bytes);
        expect_refused(ErrorCode::package_incompatible, std::string{name} + ": its SHA-256 is " + sha256_of(bytes));
        worker::test::write_file(file, whole);
        const auto loaded = load_it();
        EXPECT_TRUE(loaded) << loaded.error().text();
    };
    boost::json::object& functions = manifest_["functions"].emplace_object();
    for (const char* name : {"decode.pt2", "decode_batch.pt2", "prefill.pt2"})
        functions[name] = sha256_of(worker::test::contents(package_ / name));
    changed("decode_batch.pt2", [](const std::string& bytes) { return bytes.find("\177ELF") + 1000; });
    changed("weights.safetensors", [](const std::string& bytes) { return bytes.size() - 1; });
    functions["prefill.pt2"] = "5eed";
    expect_refused(ErrorCode::package_incompatible, "functions.prefill.pt2\" is \"5eed\", which is not a SHA-256");

    manifest_.erase("functions");  // a package of an earlier exporter
    manifest_["weights"].as_object().erase("sha256");
    const auto loaded = load_it();
    EXPECT_TRUE(loaded) << loaded.error().text();
}

TEST_F(GenerationPackage, HeaderThatLiesIsRefused) {
    const auto first_of = [](boost::json::object& header) -> boost::json::object& {
        for (auto& [name, entry] : header)
            if (name != "__metadata__") return entry.as_object();
        throw std::runtime_error{"no tensor"};
    };
    edit_header([&](auto& header) { first_of(header)["data_offsets"] = boost::json::array{0, 1ULL << 40}; });
    expect_refused(ErrorCode::package_incompatible, "lies at bytes");
    edit_header([&](auto& header) { first_of(header)["shape"] = boost::json::array{1LL << 40, 1LL << 40}; });
    expect_refused(ErrorCode::package_incompatible, "exceeds 2^63 bytes");
    edit_header([&](auto& header) { first_of(header)["dtype"] = "F5"; });
    expect_refused(ErrorCode::package_incompatible, "F5");
}

TEST_F(GenerationPackage, ConstantThatIsMissingOrOfAnotherTypeIsNamed) {
    std::string name;
    edit_header([&](auto& header) {
        for (const auto& [key, entry] : header)
            if (key != "__metadata__" && name.empty()) name = key;
        boost::json::value entry = header.at(name);
        header.erase(name);
        header["renamed"] = entry;
    });
    expect_refused(ErrorCode::package_incompatible, name + " is not among the weights");
    edit_header([&](auto& header) {
        header[name] = header.at("renamed");
        header[name].as_object()["dtype"] = "I32";
    });
    expect_refused(ErrorCode::package_incompatible, name + " is Float");
}

Manifest manifest_of(std::uint32_t layers, std::uint32_t heads, std::uint32_t dim) {
    Manifest manifest;
    manifest.layers = layers;
    manifest.heads = heads;
    manifest.dim = dim;
    manifest.kv_dtype = wire::DType::float32;
    return manifest;
}

TEST(GenerationFit, TellsWhatWouldFit) {
    Manifest manifest = manifest_of(32, 8, 128);  // 256 KiB a position
    manifest.shape.slots = 4;
    manifest.shape.length = 8192;
    EXPECT_EQ(kv_bytes(manifest), 8ULL << 30);
    EXPECT_TRUE(check_fit(manifest, 8ULL << 30, 17ULL << 30, "on a GPU"));

    const auto refused = check_fit(manifest, 8ULL << 30, (12ULL << 30) + (64ULL << 20), "on a GPU");
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::out_of_memory);
    EXPECT_THAT(refused.error().attempt, HasSubstr("4 slots of 8192 positions"));
    EXPECT_THAT(refused.error().remedy, HasSubstr("generate.slots: 2"));
    EXPECT_THAT(refused.error().remedy, HasSubstr("generate.length: 4096"));
    EXPECT_THAT(refused.error().remedy, HasSubstr("--kv-dtype bfloat16"));

    const auto hopeless = check_fit(manifest, 8ULL << 30, 4ULL << 30, "on a GPU");
    ASSERT_FALSE(hopeless);
    EXPECT_THAT(hopeless.error().remedy, HasSubstr("unload another model"));
}

TEST(GenerationFit, TellsWhatLeavesMoreToStepsThatFoundTooLittle) {
    Manifest manifest = manifest_of(32, 8, 128);
    manifest.device = "cuda";
    Shape& shape = manifest.shape;
    shape.slots = 4;
    shape.length = 8192;
    shape.buckets = {1024, 8192};
    const Error ran_out{ErrorCode::out_of_memory, "capturing 4 sequences x 8192 positions: no room", {}};
    const Error told = say_what_leaves_more(ran_out, manifest, 8ULL << 30, 17ULL << 30);
    EXPECT_EQ(told.code, ErrorCode::out_of_memory);
    EXPECT_EQ(told.attempt,
              "capturing 4 sequences x 8192 positions: no room; of 17408 MiB that were free, it asks for 8192 MiB of "
              "weights and 8192 MiB of KV (4 slots of 8192 positions, float32), and steps, their graphs and a long "
              "prompt take more");
    EXPECT_EQ(
        told.remedy,
        "generate.slots: 2 leaves 4096 MiB more; or generate.length: 4096 leaves 4096 MiB more; or an export with "
        "--kv-dtype bfloat16 leaves 4096 MiB more; or fewer generate.buckets need fewer graphs; or a smaller "
        "generate.prefill_chunk needs less for a long prompt; or unload another model");

    shape.slots = 1;
    shape.length = 64;
    shape.buckets = {64};
    manifest.kv_dtype = wire::DType::bfloat16;
    manifest.device = "cpu";
    EXPECT_EQ(say_what_leaves_more(ran_out, manifest, 8ULL << 30, 8ULL << 30).remedy, "unload another model");
    const Error other{ErrorCode::load_failed, "reading", "read"};
    EXPECT_EQ(say_what_leaves_more(other, manifest, 0, 0), other);
}

/// The address space of this process, to be limited for a while.
class AddressSpace {
public:
    AddressSpace() { ::getrlimit(RLIMIT_AS, &before_); }
    ~AddressSpace() { ::setrlimit(RLIMIT_AS, &before_); }
    AddressSpace(const AddressSpace&) = delete;
    AddressSpace& operator=(const AddressSpace&) = delete;
    void leave(std::uint64_t bytes) const {
        std::ifstream statm{"/proc/self/statm"};
        std::uint64_t pages = 0;
        statm >> pages;
        const rlimit limited{pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) + bytes, before_.rlim_max};
        ASSERT_EQ(::setrlimit(RLIMIT_AS, &limited), 0);
    }

private:
    rlimit before_{};
};

TEST_F(GenerationPackage, MemoryThatRunsOutWhileLoadingIsToldWithWhatLeavesMore) {
    ASSERT_TRUE(load_it());
    if (free_host_bytes() < 2ULL << 30)
        GTEST_SKIP() << "less than 2 GiB are free: a look at the memory would refuse it";
    // 1 GiB of KV, which a look at the free memory lets pass.
    manifest_["length_max"] = manifest_["length"] = 1 << 18;
    manifest_["slots"] = 8;
    manifest_["buckets"] = boost::json::array{1 << 18};
    const AddressSpace space;
    space.leave(512ULL << 20);
    const auto loaded = load_it();
    ASSERT_FALSE(loaded);
    EXPECT_EQ(loaded.error().code, ErrorCode::out_of_memory) << loaded.error().text();
    EXPECT_THAT(loaded.error().attempt,
                HasSubstr(fmt::format("it asks for {}1024 MiB of KV (8 slots of 262144 positions, float32)",
                                      HugePages::reserve(1) ? "0 MiB of weights and " : "")))
        << "weights that were copied count, less than 1 MiB here";
    EXPECT_THAT(loaded.error().remedy, HasSubstr("generate.slots: 4 leaves 512 MiB more"));
}

}  // namespace
}  // namespace bulkhead::worker::generation::test
