#include <cstdlib>
#include <deque>
#include <sstream>

#include "tests/fakes/fake_cuda/fake.h"

namespace fake_cuda {
namespace {

constexpr const char* only_gpu = "GPU-fa4e0000-0000-4000-8000-000000000001";

std::vector<std::string> listed(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    std::istringstream list{value == nullptr ? otherwise : value};
    std::vector<std::string> items;
    for (std::string item; std::getline(list, item, ',');) items.push_back(item);
    return items;
}

Uuid parse(const std::string& text) {
    Uuid uuid{};
    std::size_t digits = 0;
    for (std::size_t i = 4; i < text.size() && digits < 32; ++i) {
        if (text[i] == '-') continue;
        const int value = std::stoi(text.substr(i, 1), nullptr, 16);
        uuid[digits / 2] = static_cast<char>(uuid[digits / 2] * 16 + value);
        ++digits;
    }
    return uuid;
}

std::vector<Uuid> find_visible() {
    const std::vector<std::string> all = listed("BULKHEAD_FAKE_CUDA_GPUS", only_gpu);
    std::vector<Uuid> visible;
    if (std::getenv("CUDA_VISIBLE_DEVICES") == nullptr) {
        for (const std::string& gpu : all) visible.push_back(parse(gpu));
        return visible;
    }
    // As the real one: the first that does not exist hides those behind it.
    for (const std::string& wanted : listed("CUDA_VISIBLE_DEVICES", "")) {
        std::size_t found = all.size();
        for (std::size_t i = 0; i < all.size(); ++i)
            if (wanted == std::to_string(i) || (wanted.starts_with("GPU-") && all[i].starts_with(wanted))) found = i;
        if (found == all.size()) break;
        visible.push_back(parse(all[found]));
    }
    return visible;
}

}  // namespace

const std::vector<Uuid>& visible_gpus() {
    static const auto& gpus = *new std::vector<Uuid>{find_visible()};
    return gpus;
}

std::string text(const Uuid& uuid) {
    constexpr auto* digits = "0123456789abcdef";
    std::string text = "GPU";
    for (std::size_t i = 0; i < uuid.size(); ++i) {
        if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) text += '-';
        text += digits[static_cast<unsigned char>(uuid[i]) >> 4];
        text += digits[static_cast<unsigned char>(uuid[i]) & 15];
    }
    return text;
}

bool lacks(int attribute) {
    for (const std::string& number : listed("BULKHEAD_FAKE_CUDA_LACKS", ""))
        if (number == std::to_string(attribute)) return true;
    return false;
}

CUctx_st& primary_context(int ordinal) {
    static auto& contexts = *[] {
        auto* made = new std::deque<CUctx_st>;
        for (std::size_t i = 0; i < visible_gpus().size(); ++i) made->emplace_back(static_cast<int>(i));
        return made;
    }();
    return contexts[static_cast<std::size_t>(ordinal)];
}

}  // namespace fake_cuda
