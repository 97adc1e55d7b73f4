#pragma once

#define SHOESTRING_API __attribute__((visibility("default")))
