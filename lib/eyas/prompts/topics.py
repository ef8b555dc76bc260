"""Hold the texts of the prompt set: topics with a few plain facts, and phrasings by category.

This module holds only data. `eyas.prompts.build.build_prompts` fills the phrasings with the topics.
The facts are short common knowledge, written for this project.
"""

from typing import NamedTuple


class Topic(NamedTuple):
    name: str  # noun phrase that fits after "about"
    # Beginnings of the words that belong to the topic, to check that a held-out topic is never
    # trained on
    stems: str
    items: str  # plural, countable
    measure: str  # one number that such an item has, usable as a field name
    activity: str  # gerund phrase: what a person may be doing with it
    pair: tuple[str, str]  # two things within the topic that people compare
    facts: tuple[str, str, str]


TOPICS = (
    # Nature
    Topic(
        "volcanoes",
        "volcan lava magma",
        "volcanoes",
        "height",
        "hiking up an old volcano",
        ("shield volcanoes", "stratovolcanoes"),
        (
            "Volcanoes form where melted rock rises through cracks in the Earth's crust.",
            "Once magma reaches the surface it is called lava.",
            "About 1,350 volcanoes on Earth are thought to be active.",
        ),
    ),
    Topic(
        "glaciers",
        "glacier",
        "glaciers",
        "length",
        "walking on a glacier with a guide",
        ("valley glaciers", "ice sheets"),
        (
            "Glaciers are thick masses of ice that move slowly downhill.",
            "They carve wide valleys with a shape like the letter U.",
            "Most of the world's fresh water is stored in them.",
        ),
    ),
    Topic(
        "earthquakes",
        "earthquake seism",
        "earthquakes",
        "magnitude",
        "preparing the house for an earthquake",
        ("the epicentre", "the focus of an earthquake"),
        (
            "Most earthquakes happen at the edges of tectonic plates.",
            "A seismometer records how the ground shakes.",
            "Each step of the magnitude scale means about 32 times more energy.",
        ),
    ),
    Topic(
        "honey bees",
        "bee bees honey hive",
        "hives",
        "weight",
        "keeping two hives behind the house",
        ("worker bees", "drones"),
        (
            "A hive of honey bees holds one queen and many thousands of workers.",
            "Bees show each other the way to flowers by a waggle dance.",
            "A worker makes about a twelfth of a teaspoon of honey in her life.",
        ),
    ),
    Topic(
        "whales",
        "whale",
        "whales",
        "length",
        "watching whales from a small boat",
        ("baleen whales", "toothed whales"),
        (
            "Whales breathe air and must come up to the surface.",
            "The blue whale is the largest animal known to have lived.",
            "Humpback males sing long songs that change from year to year.",
        ),
    ),
    Topic(
        "owls",
        "owl owls",
        "owls",
        "wingspan",
        "building a nest box for owls",
        ("barn owls", "tawny owls"),
        (
            "Owls can turn their heads by about 270 degrees.",
            "Soft edges on their feathers make their flight almost silent.",
            "Many owls swallow mice whole and later cough up a pellet.",
        ),
    ),
    Topic(
        "penguins",
        "penguin",
        "penguins",
        "weight",
        "photographing penguins at the zoo",
        ("emperor penguins", "king penguins"),
        (
            "Penguins are birds that swim but cannot fly.",
            "Emperor fathers keep the egg warm on their feet through the winter.",
            "Nearly all wild penguins live south of the equator.",
        ),
    ),
    Topic(
        "spiders",
        "spider",
        "spiders",
        "size",
        "overcoming a fear of spiders",
        ("jumping spiders", "web-building spiders"),
        (
            "Spiders have eight legs and are not insects.",
            "Their silk is made as a liquid and hardens as it is pulled out.",
            "Not every spider builds a web; some hunt on foot.",
        ),
    ),
    Topic(
        "butterflies",
        "butterfl caterpillar",
        "butterflies",
        "wingspan",
        "planting flowers for butterflies",
        ("butterflies", "moths"),
        (
            "Butterflies begin life as caterpillars that do little but eat.",
            "Inside the chrysalis the body is rebuilt almost completely.",
            "They taste with sensors on their feet.",
        ),
    ),
    Topic(
        "rainforests",
        "rainforest",
        "rainforests",
        "area",
        "writing a school report about rainforests",
        ("tropical rainforests", "temperate rainforests"),
        (
            "Rainforests grow where it is warm and wet all the year.",
            "Little light gets through the canopy to the ground.",
            "They hold more than half of the known species on land.",
        ),
    ),
    Topic(
        "deserts",
        "desert deserts dune",
        "deserts",
        "area",
        "crossing a desert by car",
        ("hot deserts", "cold deserts"),
        (
            "Deserts receive less than 250 millimetres of rain a year.",
            "Nights there are cold because dry air holds little heat.",
            "Many desert plants store water in thick stems.",
        ),
    ),
    Topic(
        "mushrooms",
        "mushroom fung",
        "mushrooms",
        "weight",
        "growing mushrooms in the cellar",
        ("oyster mushrooms", "button mushrooms"),
        (
            "Mushrooms are the fruit of a network of fine threads underground.",
            "They feed on dead wood, leaves and soil instead of sunlight.",
            "Some edible kinds look very much like poisonous ones.",
        ),
    ),
    Topic(
        "oak trees",
        "oak oaks acorn",
        "oak trees",
        "height",
        "planting an oak tree",
        ("oak trees", "pine trees"),
        (
            "Oak trees can live for several hundred years.",
            "Jays bury acorns and forget some, which helps new trees to grow.",
            "Oak wood is hard and was used for ships and barrels.",
        ),
    ),
    Topic(
        "coral reefs",
        "coral reef",
        "reefs",
        "depth",
        "snorkelling over a coral reef",
        ("hard corals", "soft corals"),
        (
            "Coral reefs are built by tiny animals over thousands of years.",
            "Corals live together with algae, which give them food and colour.",
            "If the sea gets too warm the corals lose their algae and turn white.",
        ),
    ),
    Topic(
        "thunderstorms",
        "thunder lightning",
        "thunderstorms",
        "duration",
        "camping during a thunderstorm",
        ("thunder", "lightning"),
        (
            "Thunderstorms grow where warm, moist air rises quickly.",
            "Lightning heats the air to about 30,000 degrees.",
            (
                "Counting the seconds to the thunder and dividing by three gives the distance in "
                "kilometres."
            ),
        ),
    ),
    Topic(
        "tides",
        "tide tides tidal",
        "tides",
        "height",
        "planning a beach walk around the tides",
        ("spring tides", "neap tides"),
        (
            "Tides are caused mainly by the pull of the Moon.",
            "Most coasts have two high tides a day.",
            "In the Bay of Fundy the water can rise by 16 metres.",
        ),
    ),
    Topic(
        "caves",
        "cave caves stalact stalag",
        "caves",
        "depth",
        "exploring a cave with friends",
        ("stalactites", "stalagmites"),
        (
            "Many caves form when rain water slowly dissolves limestone.",
            "Stalactites hang from the ceiling, and stalagmites grow from the floor.",
            "The air inside a deep cave has nearly the same temperature all year.",
        ),
    ),
    Topic(
        "squirrels",
        "squirrel",
        "squirrels",
        "weight",
        "feeding squirrels in the park",
        ("red squirrels", "grey squirrels"),
        (
            "Squirrels bury nuts in many places for the winter.",
            "They find most of them again by smell and memory.",
            "Their bushy tail helps them to keep their balance.",
        ),
    ),
    # Sky and science
    Topic(
        "the Moon",
        "moon lunar",
        "craters",
        "diameter",
        "looking at the Moon through a telescope",
        ("a lunar eclipse", "a solar eclipse"),
        (
            "The Moon goes around the Earth in about 27 days.",
            "It always shows us the same side.",
            "Twelve people have walked on it, the last in 1972.",
        ),
    ),
    Topic(
        "black holes",
        "black hole",
        "black holes",
        "mass",
        "reading a book about black holes",
        ("black holes", "neutron stars"),
        (
            "A black hole is a region from which not even light escapes.",
            "Some form when a very heavy star collapses.",
            "The first picture of one was published in 2019.",
        ),
    ),
    Topic(
        "comets",
        "comet comets",
        "comets",
        "speed",
        "waiting for a comet with binoculars",
        ("comets", "asteroids"),
        (
            "Comets are balls of ice and dust that travel around the Sun.",
            "Near the Sun the ice turns to gas and forms a tail.",
            "Halley's comet returns about every 76 years.",
        ),
    ),
    Topic(
        "rainbows",
        "rainbow",
        "rainbows",
        "brightness",
        "trying to photograph a rainbow",
        ("single rainbows", "double rainbows"),
        (
            "Rainbows appear when sunlight is bent and reflected inside rain drops.",
            "You see one only with the Sun behind you.",
            "In a double rainbow the second arc has its colours in the opposite order.",
        ),
    ),
    Topic(
        "magnets",
        "magnet",
        "magnets",
        "strength",
        "building a compass with magnets",
        ("permanent magnets", "electromagnets"),
        (
            "Magnets have two poles, and equal poles push each other away.",
            "If you cut one in half you get two smaller ones.",
            "The Earth itself acts like a huge magnet.",
        ),
    ),
    Topic(
        "batteries",
        "batter",
        "batteries",
        "capacity",
        "replacing the batteries of an old laptop",
        ("alkaline batteries", "lithium-ion batteries"),
        (
            "Batteries turn chemical energy into electric energy.",
            "Very cold weather lowers the power that they can deliver.",
            "Old ones should be recycled because they contain useful metals.",
        ),
    ),
    Topic(
        "solar panels",
        "solar panel photovolt",
        "solar panels",
        "power",
        "putting solar panels on the roof",
        ("solar panels", "wind turbines"),
        (
            "Solar panels turn light directly into electricity.",
            "They work on cloudy days too, but with less power.",
            "A typical panel lasts 25 years or more.",
        ),
    ),
    Topic(
        "microscopes",
        "microscop",
        "microscopes",
        "magnification",
        "looking at pond water with a microscope",
        ("light microscopes", "electron microscopes"),
        (
            "Microscopes make very small things visible.",
            "In the 1670s van Leeuwenhoek saw tiny living things in a drop of water.",
            "A thin slice lets the light shine through the sample.",
        ),
    ),
    Topic(
        "vaccines",
        "vaccin",
        "vaccines",
        "dose",
        "asking a doctor about a vaccine before a journey",
        ("live vaccines", "mRNA vaccines"),
        (
            "Vaccines train the immune system to know a germ before it causes illness.",
            "Edward Jenner tested the first one in 1796.",
            "Smallpox was declared ended in 1980 thanks to them.",
        ),
    ),
    Topic(
        "the human heart",
        "heart hearts",
        "heart rates",
        "rate",
        "training with a heart rate monitor",
        ("arteries", "veins"),
        (
            "The human heart beats about 100,000 times a day.",
            "It pumps blood through four chambers.",
            "Regular walking makes the heart stronger.",
        ),
    ),
    Topic(
        "sleep",
        "sleep asleep",
        "nights",
        "duration",
        "trying to sleep better",
        ("deep sleep", "dream sleep"),
        (
            "Most adults need seven to nine hours of sleep.",
            "The brain passes through several sleep phases in cycles of about 90 minutes.",
            "Bright screens late in the evening make it harder to fall asleep.",
        ),
    ),
    Topic(
        "DNA",
        "dna gene genes genetic",
        "genes",
        "length",
        "taking a DNA test for the family tree",
        ("DNA", "RNA"),
        (
            "DNA carries the instructions for building a living thing.",
            "It has the shape of a twisted ladder.",
            "Humans share about half of their genes with bananas in some form.",
        ),
    ),
    Topic(
        "dinosaurs",
        "dinosaur fossil",
        "fossils",
        "age",
        "digging for fossils on holiday",
        ("meat-eating dinosaurs", "plant-eating dinosaurs"),
        (
            "Dinosaurs ruled the land for more than 160 million years.",
            "Most of them died out about 66 million years ago.",
            "Birds are their living relatives.",
        ),
    ),
    Topic(
        "gravity",
        "gravit",
        "falling objects",
        "speed",
        "explaining gravity to my little sister",
        ("weight", "mass"),
        (
            "Gravity pulls all things with mass towards each other.",
            "Newton described it with a law in 1687.",
            "Without air a feather and a hammer fall equally fast.",
        ),
    ),
    Topic(
        "prime numbers",
        "prime primes",
        "prime numbers",
        "value",
        "practising with prime numbers",
        ("prime numbers", "square numbers"),
        (
            "Prime numbers can be divided only by one and by themselves.",
            "Euclid proved that there is no largest one.",
            "Large primes help to keep messages secret on the internet.",
        ),
    ),
    # Food
    Topic(
        "bread baking",
        "bread sourdough loaf loaves",
        "loaves of bread",
        "weight",
        "baking my first sourdough bread",
        ("sourdough bread", "bread made with dry yeast"),
        (
            "Yeast makes gas that lets bread dough rise.",
            "Kneading helps gluten to form a stretchy net.",
            "Bread should cool before it is cut.",
        ),
    ),
    Topic(
        "coffee",
        "coffee espresso",
        "cups of coffee",
        "price",
        "making better coffee at home",
        ("filter coffee", "espresso"),
        (
            "Coffee beans are the seeds of a red fruit.",
            "Roasting gives them their brown colour and smell.",
            "Finely ground coffee gives up its taste faster than coarse coffee.",
        ),
    ),
    Topic(
        "tea",
        "tea teas teapot",
        "cups of tea",
        "price",
        "choosing a tea for the afternoon",
        ("green tea", "black tea"),
        (
            "Green and black tea come from the same plant.",
            "Black tea is oxidised after the leaves are picked.",
            "Water that is too hot makes green tea bitter.",
        ),
    ),
    Topic(
        "cheese",
        "cheese chees",
        "cheeses",
        "price",
        "putting together a cheese board",
        ("soft cheese", "hard cheese"),
        (
            "Cheese is made from milk, salt, cultures and often rennet.",
            "Hard kinds ripen for months or even years.",
            "The holes in some cheeses come from gas made by bacteria.",
        ),
    ),
    Topic(
        "chocolate",
        "chocolate cocoa cacao",
        "bars of chocolate",
        "price",
        "making chocolate truffles",
        ("dark chocolate", "milk chocolate"),
        (
            "Chocolate is made from the beans of the cacao tree.",
            "The beans are fermented, dried and roasted.",
            "Good chocolate breaks with a clear snap.",
        ),
    ),
    Topic(
        "pasta",
        "pasta spaghetti noodle",
        "plates of pasta",
        "price",
        "cooking pasta for six people",
        ("fresh pasta", "dried pasta"),
        (
            "Dried pasta is made from durum wheat and water.",
            "A little of its cooking water helps a sauce to bind.",
            "Thick shapes hold a chunky sauce well.",
        ),
    ),
    Topic(
        "soup",
        "soup soups broth",
        "bowls of soup",
        "price",
        "cooking soup from leftovers",
        ("clear soups", "cream soups"),
        (
            "Soup can use up vegetables that are no longer pretty.",
            "Slow cooking brings out the taste of bones and roots.",
            "A squeeze of lemon can save a flat broth.",
        ),
    ),
    Topic(
        "apples",
        "apple apples cider",
        "apples",
        "weight",
        "picking apples in October",
        ("sweet apples", "sour apples"),
        (
            "There are more than 7,000 kinds of apple.",
            "A cut apple turns brown because it reacts with air.",
            "Apples keep for months in a cool cellar.",
        ),
    ),
    Topic(
        "potatoes",
        "potato",
        "potatoes",
        "weight",
        "growing potatoes in a bucket",
        ("floury potatoes", "waxy potatoes"),
        (
            "Potatoes were first grown in the Andes.",
            "They turn green in the light and should then not be eaten.",
            "A single plant can give ten or more of them.",
        ),
    ),
    Topic(
        "rice",
        "rice rices paddy",
        "bags of rice",
        "price",
        "cooking rice without burning it",
        ("basmati rice", "risotto rice"),
        (
            "Rice feeds about half of the people on Earth.",
            "It often grows in flooded fields.",
            "Washing the grains removes starch, so they stick less.",
        ),
    ),
    Topic(
        "ice cream",
        "ice cream gelato sorbet",
        "scoops of ice cream",
        "price",
        "making ice cream without a machine",
        ("ice cream", "sorbet"),
        (
            "Ice cream is stirred while it freezes so that the crystals stay small.",
            "Air makes it light and soft.",
            "Salt lowers the freezing point of the ice around an old hand machine.",
        ),
    ),
    Topic(
        "pickles",
        "pickle pickl ferment",
        "jars of pickles",
        "price",
        "pickling cucumbers for the winter",
        ("vinegar pickles", "salt pickles"),
        (
            "Pickles keep for months because acid stops most germs.",
            "In salt pickles bacteria make the acid themselves.",
            "Dill, garlic and mustard seeds are common spices for them.",
        ),
    ),
    Topic(
        "breakfast",
        "breakfast porridge",
        "breakfasts",
        "price",
        "preparing breakfast the evening before",
        ("a sweet breakfast", "a savoury breakfast"),
        (
            "Oats for breakfast keep many people full until noon.",
            "In Japan people often start the day with fish and miso.",
            "Preparing fruit in the evening saves time in the morning.",
        ),
    ),
    # Technology
    Topic(
        "bicycles",
        "bicycl bike biker cycling cyclist",
        "bicycles",
        "price",
        "commuting by bicycle",
        ("road bikes", "mountain bikes"),
        (
            "Bicycles turn about 95 percent of a rider's effort into motion.",
            "A clean and oiled chain lasts much longer.",
            "Cycling for half an hour a day is good exercise.",
        ),
    ),
    Topic(
        "electric cars",
        "electric car charger",
        "electric cars",
        "range",
        "buying an electric car",
        ("electric cars", "petrol cars"),
        (
            "Electric cars win back energy when they brake.",
            "Their motors have few moving parts.",
            "Fast chargers fill most of the range in about half an hour.",
        ),
    ),
    Topic(
        "trains",
        "train trains railway",
        "trains",
        "speed",
        "crossing Europe by train",
        ("night trains", "high-speed trains"),
        (
            "Trains need little energy because steel wheels roll easily on steel rails.",
            "The first public railway with steam engines opened in 1825.",
            "A high-speed train can reach 300 kilometres an hour.",
        ),
    ),
    Topic(
        "bridges",
        "bridge bridges",
        "bridges",
        "length",
        "building a model bridge from paper",
        ("suspension bridges", "arch bridges"),
        (
            "Bridges must carry their own weight as well as the traffic.",
            "Arches turn the load into pressure on both ends.",
            "Gaps in the road surface let a bridge grow on hot days.",
        ),
    ),
    Topic(
        "airplanes",
        "airplane aircraft flight pilot",
        "airplanes",
        "range",
        "overcoming a fear of flights",
        ("propeller airplanes", "jet airplanes"),
        (
            "Airplanes stay up because their wings push air down.",
            "In 1903 the first powered flight lasted twelve seconds.",
            "Each pilot of an airliner gets a different meal on many flights.",
        ),
    ),
    Topic(
        "robots",
        "robot",
        "robots",
        "price",
        "building a small robot with my son",
        ("industrial robots", "household robots"),
        (
            "Robots sense, decide and act in a loop.",
            "The word comes from a Czech play of 1920.",
            "Factory robots repeat the same motion with great precision.",
        ),
    ),
    Topic(
        "3D printing",
        "3d print printer filament",
        "printed parts",
        "weight",
        "buying a 3D printer",
        ("resin printing", "filament printing"),
        (
            "A 3D printer builds an object layer by layer.",
            "Hollow patterns inside save material and time.",
            "Steep overhangs need supports that are removed later.",
        ),
    ),
    Topic(
        "search engines",
        "search engine",
        "search results",
        "rank",
        "finding good sources with a search engine",
        ("search engines", "library catalogues"),
        (
            "Search engines visit pages with programs called crawlers.",
            "They keep an index, much like the one at the end of a book.",
            "Quotation marks ask for an exact phrase.",
        ),
    ),
    Topic(
        "passwords",
        "password passphrase",
        "passwords",
        "length",
        "cleaning up my old passwords",
        ("passwords", "passkeys"),
        (
            "Long passwords are harder to guess than complicated short ones.",
            "A manager program remembers a different one for each site.",
            "A second factor protects an account even if the password leaks.",
        ),
    ),
    Topic(
        "spreadsheets",
        "spreadsheet",
        "spreadsheets",
        "size",
        "keeping the household budget in a spreadsheet",
        ("spreadsheets", "databases"),
        (
            "Spreadsheets compute each cell again when a number changes.",
            "VisiCalc, from 1979, was the first for home computers.",
            "A small mistake in one formula can spoil a whole budget.",
        ),
    ),
    Topic(
        "databases",
        "database sql",
        "databases",
        "size",
        "learning how databases work",
        ("relational databases", "document databases"),
        (
            "Databases store facts so that they can be found again quickly.",
            "An index speeds up reading but slows down writing.",
            "A transaction happens completely or not at all.",
        ),
    ),
    Topic(
        "unit tests",
        "unit test pytest",
        "unit tests",
        "duration",
        "writing unit tests for an old program",
        ("unit tests", "integration tests"),
        (
            "Unit tests check one small piece of a program.",
            "A good test fails when the code is wrong and only then.",
            "Fast tests are run more often than slow ones.",
        ),
    ),
    Topic(
        "version control with git",
        "git commit",
        "commits",
        "size",
        "learning git for a group project",
        ("merging", "rebasing"),
        (
            "Git keeps the history of a project as a chain of commits.",
            "A branch is only a name that points to a commit.",
            "Small commits with clear messages are easier to review.",
        ),
    ),
    Topic(
        "telephones",
        "telephone phone phones",
        "phones",
        "price",
        "choosing a phone for my grandmother",
        ("smartphones", "simple phones with buttons"),
        (
            "Early telephones were connected by hand at a switchboard.",
            "The first call was made in 1876.",
            "Today most people carry a phone with more power than early computers.",
        ),
    ),
    Topic(
        "cameras",
        "camera photograph lens",
        "cameras",
        "price",
        "buying a first camera",
        ("film cameras", "digital cameras"),
        (
            "Cameras let light in through a small opening called the aperture.",
            "A long exposure makes moving water look like mist.",
            "Large sensors do better in the dark.",
        ),
    ),
    Topic(
        "clocks and watches",
        "clock watch watches",
        "watches",
        "price",
        "repairing an old wall clock",
        ("mechanical watches", "quartz watches"),
        (
            "Clocks once depended on pendulums to keep a steady beat.",
            "A quartz crystal vibrates 32,768 times a second.",
            "Sailors needed exact clocks to find their longitude.",
        ),
    ),
    # Daily life
    Topic(
        "balcony gardening",
        "balcon gardening",
        "pots",
        "price",
        "starting a small garden on the balcony",
        ("herbs", "vegetables"),
        (
            "Herbs on a balcony need pots with holes in the bottom.",
            "Morning is the best time for watering.",
            "Basil likes a warm place out of the wind.",
        ),
    ),
    Topic(
        "tomatoes",
        "tomato",
        "tomato plants",
        "height",
        "growing tomatoes on a sunny terrace",
        ("cherry tomatoes", "beef tomatoes"),
        (
            "Tomatoes like sun and an even supply of water.",
            "Side shoots are often pinched out.",
            "In the fridge a tomato loses much of its taste.",
        ),
    ),
    Topic(
        "compost",
        "compost",
        "compost heaps",
        "temperature",
        "starting a compost heap",
        ("compost", "mineral fertiliser"),
        (
            "Compost is made by worms, bacteria and time.",
            "A good heap mixes green and brown material.",
            "Cooked meat attracts rats and should stay out.",
        ),
    ),
    Topic(
        "house plants",
        "house plant houseplant",
        "house plants",
        "price",
        "keeping house plants alive",
        ("cacti", "ferns"),
        (
            "House plants die more often from too much water than from too little.",
            "Dust on the leaves takes away light.",
            "Many of them rest in winter and need little food.",
        ),
    ),
    Topic(
        "dogs",
        "dog dogs puppy puppies",
        "dogs",
        "weight",
        "training a young dog",
        ("herding dogs", "guard dogs"),
        (
            "Dogs have lived with people for more than 15,000 years.",
            "Rewards work better than punishment in training.",
            "A dog's nose is many thousand times better than ours.",
        ),
    ),
    Topic(
        "cats",
        "cat cats kitten",
        "cats",
        "weight",
        "moving house with a nervous cat",
        ("indoor cats", "outdoor cats"),
        (
            "Cats spend about two thirds of their lives resting.",
            "They use their whiskers to judge narrow gaps.",
            "A scratching post saves the sofa.",
        ),
    ),
    Topic(
        "moving to a new flat",
        "moving removal",
        "boxes",
        "weight",
        "moving to a new flat in another town",
        ("hiring movers", "moving with friends"),
        (
            "Heavy things belong in small boxes.",
            "Labels on two sides help on the day of the move.",
            "A bag with clean clothes and tools should travel with you.",
        ),
    ),
    Topic(
        "saving money",
        "saving savings budget",
        "savings plans",
        "amount",
        "saving money for a holiday",
        ("a savings account", "shares"),
        (
            "A budget shows where the money goes each month.",
            "An automatic transfer on payday makes saving easier.",
            "Many advisers suggest keeping three months of spending aside.",
        ),
    ),
    Topic(
        "job interviews",
        "interview",
        "interviews",
        "duration",
        "preparing for a job interview",
        ("telephone interviews", "interviews in person"),
        (
            "Job interviews go better with two or three prepared stories.",
            "Asking a good question shows interest.",
            "A short note of thanks afterwards is polite.",
        ),
    ),
    Topic(
        "public speaking",
        "speech speeches speaker",
        "speeches",
        "duration",
        "giving a speech at a wedding",
        ("speaking from notes", "speaking freely"),
        (
            "A speech needs one main message.",
            "Pauses give the listeners time to think.",
            "Practising aloud shows which sentences are too long.",
        ),
    ),
    Topic(
        "running",
        "running runner marathon jogging",
        "runs",
        "distance",
        "running my first ten kilometres",
        ("running on roads", "running on trails"),
        (
            "Running too much too soon often leads to sore knees.",
            "A slow pace lets you talk in full sentences.",
            "A marathon is a little more than 42 kilometres long.",
        ),
    ),
    Topic(
        "swimming",
        "swim swimm",
        "lengths",
        "time",
        "learning to swim as an adult",
        ("breaststroke", "front crawl"),
        (
            "Swimming trains nearly all muscles and is easy on the joints.",
            "Breathing out under water keeps the rhythm calm.",
            "A pool of Olympic size is 50 metres long.",
        ),
    ),
    Topic(
        "yoga",
        "yoga",
        "yoga classes",
        "duration",
        "doing yoga in the morning",
        ("yoga", "weight lifting"),
        (
            "Yoga joins slow movement with breathing.",
            "It began in India long ago.",
            "A mat that does not slip prevents falls.",
        ),
    ),
    Topic(
        "knitting",
        "knit yarn",
        "scarves",
        "length",
        "knitting a scarf as a present",
        ("knitting", "crochet"),
        (
            "Knitting uses two needles and a single thread of yarn.",
            "Wool is warm even when it is damp.",
            "A dropped stitch can be picked up with a hook.",
        ),
    ),
    Topic(
        "board games",
        "board game",
        "board games",
        "price",
        "choosing a board game for a family evening",
        ("cooperative games", "competitive games"),
        (
            "Board games were played in Egypt 5,000 years ago.",
            "Good rules fit on a few pages.",
            "Cooperative games let all players win or lose together.",
        ),
    ),
    Topic(
        "chess",
        "chess checkmate pawn",
        "chess games",
        "moves",
        "joining a chess club",
        ("bishops", "knights"),
        (
            "Chess is played on 64 squares.",
            "The game ends when a king is in checkmate.",
            "A pawn that reaches the last row may become a queen.",
        ),
    ),
    Topic(
        "origami",
        "origami",
        "paper cranes",
        "size",
        "folding origami cranes with children",
        ("origami", "paper cutting"),
        (
            "Origami makes figures from one sheet without scissors.",
            "The crane is its best-known figure.",
            "Engineers use the same folds to pack sails for space probes.",
        ),
    ),
    Topic(
        "camping",
        "camping campsite tent",
        "tents",
        "weight",
        "going camping with two children",
        ("a tent", "a camper van"),
        (
            "A tent should stand on slightly higher ground.",
            "Food kept in closed boxes attracts fewer animals.",
            "Campsites near a lake are often full in July.",
        ),
    ),
    Topic(
        "recycling",
        "recycl",
        "bins",
        "weight",
        "explaining recycling to new neighbours",
        ("recycling glass", "recycling plastic"),
        (
            "Glass can be recycled again and again without loss.",
            "Greasy paper spoils a whole load of clean paper.",
            "Recycling aluminium saves about 95 percent of the energy.",
        ),
    ),
    Topic(
        "letters and postcards",
        "letter letters postcard",
        "postcards",
        "price",
        "writing a letter to an old friend",
        ("letters", "e-mails"),
        (
            "Postcards became popular around 1900.",
            "A handwritten letter is often kept for years.",
            "The first glued stamp was sold in Britain in 1840.",
        ),
    ),
    Topic(
        "first aid",
        "first aid bandage",
        "first aid kits",
        "price",
        "taking a first aid course",
        ("a sprain", "a broken bone"),
        (
            "A first aid course takes about a day.",
            "Cool running water helps against small burns.",
            "A bandage must be firm but not too tight.",
        ),
    ),
    Topic(
        "umbrellas",
        "umbrella",
        "umbrellas",
        "price",
        "looking for a lost umbrella",
        ("umbrellas", "raincoats"),
        (
            "Umbrellas were first used against the sun.",
            "Strong wind can turn a cheap one inside out.",
            "Thousands are left behind on buses each year.",
        ),
    ),
    # Arts, places, history
    Topic(
        "the violin",
        "violin",
        "violins",
        "price",
        "learning the violin at forty",
        ("the violin", "the cello"),
        (
            "The violin has four strings and is played with a bow.",
            "Famous makers worked in Cremona around 1700.",
            "Resin on the bow makes the strings sound.",
        ),
    ),
    Topic(
        "pianos",
        "piano",
        "pianos",
        "price",
        "buying a used piano",
        ("grand pianos", "upright pianos"),
        (
            "Pianos have 88 keys and more than 200 strings.",
            "Small hammers strike the strings from below or from the front.",
            "They should be tuned once or twice a year.",
        ),
    ),
    Topic(
        "jazz",
        "jazz",
        "jazz records",
        "price",
        "discovering jazz through my father's records",
        ("swing", "bebop"),
        (
            "Jazz grew up in New Orleans around 1900.",
            "Players often invent melodies during the concert.",
            "The saxophone became one of its main voices.",
        ),
    ),
    Topic(
        "opera",
        "opera operas",
        "operas",
        "duration",
        "going to the opera for the first time",
        ("operas", "musicals"),
        (
            "Opera tells a story mostly through singing.",
            "The form began in Florence near the year 1600.",
            "Many houses show a translation above the stage.",
        ),
    ),
    Topic(
        "watercolour painting",
        "watercolour",
        "watercolours",
        "price",
        "painting with watercolours on a journey",
        ("watercolours", "oil colours"),
        (
            "In watercolour painting the white of the paper gives the light.",
            "Colours look paler when they are dry.",
            "Good paper bends less when it is wet.",
        ),
    ),
    Topic(
        "museums",
        "museum",
        "museums",
        "visitors",
        "visiting a museum with a school class",
        ("art museums", "science museums"),
        (
            "Museums show only a small part of what they own.",
            "The Louvre has nearly nine million visitors in a good year.",
            "Dim light protects old paper and cloth.",
        ),
    ),
    Topic(
        "poetry",
        "poem poems poetry poet rhyme",
        "poems",
        "lines",
        "reading poems before bed",
        ("sonnets", "haiku"),
        (
            "A haiku has three short lines.",
            "A sonnet has fourteen lines.",
            "Many poems do not rhyme at all.",
        ),
    ),
    Topic(
        "fairy tales",
        "fairy tale",
        "fairy tales",
        "pages",
        "reading fairy tales to a child",
        ("fairy tales", "legends"),
        (
            "Fairy tales were told for centuries before they were printed.",
            "The Brothers Grimm published their first volume in 1812.",
            "Wolves, forests and the number three appear in many of them.",
        ),
    ),
    Topic(
        "libraries",
        "librar",
        "libraries",
        "books",
        "volunteering in a small library",
        ("libraries", "bookshops"),
        (
            "Libraries lend books, films and sometimes tools.",
            "The one in Alexandria was famous in ancient times.",
            "Many have quiet rooms where people study.",
        ),
    ),
    Topic(
        "castles",
        "castle castles fortress",
        "castles",
        "age",
        "visiting a castle ruin",
        ("castles", "palaces"),
        (
            "Castles were homes and strongholds at the same time.",
            "Spiral stairs usually turn clockwise on the way up.",
            "Cannons made their high walls less useful.",
        ),
    ),
    Topic(
        "the Roman Empire",
        "roman rome",
        "Roman roads",
        "length",
        "learning about the Roman Empire",
        ("the Roman Republic", "the Roman Empire"),
        (
            "The Roman Empire reached its greatest size in the year 117.",
            "Its roads let soldiers and traders travel quickly.",
            "Latin lives on in French, Spanish and Italian.",
        ),
    ),
    Topic(
        "ancient Egypt",
        "egypt pyramid pharaoh",
        "pyramids",
        "height",
        "planning a lesson about ancient Egypt",
        ("pyramids", "rock tombs"),
        (
            "Ancient Egypt grew along the Nile.",
            "The Great Pyramid was the tallest building for more than 3,800 years.",
            "Scribes wrote on papyrus with reed pens.",
        ),
    ),
    Topic(
        "Vikings",
        "viking norse",
        "Viking ships",
        "length",
        "reading a novel about Vikings",
        ("Vikings", "Samurai"),
        (
            "Vikings sailed as far as North America around the year 1000.",
            "Their ships could land on flat beaches.",
            "There is no proof that they wore helmets with horns.",
        ),
    ),
    Topic(
        "lighthouses",
        "lighthouse",
        "lighthouses",
        "height",
        "spending a night in a lighthouse",
        ("lighthouses", "buoys"),
        (
            "Lighthouses warn ships of rocks and shallow water.",
            "Each one has its own pattern of flashes.",
            "Most of them now work without a keeper.",
        ),
    ),
    Topic(
        "Japan",
        "japan tokyo kyoto",
        "Japanese towns",
        "population",
        "planning two weeks in Japan",
        ("Tokyo", "Kyoto"),
        (
            "Japan consists of more than 6,800 islands.",
            "Kyoto was its capital for over a thousand years.",
            "Many visitors come to see the cherry trees in spring.",
        ),
    ),
    Topic(
        "maps",
        "map maps atlas",
        "maps",
        "scale",
        "planning a hike with a paper map",
        ("paper maps", "digital maps"),
        (
            "Maps cannot show the round Earth on flat paper without some error.",
            "The scale says how much smaller everything is.",
            "Close contour lines mean a steep slope.",
        ),
    ),
)

PEOPLE = (
    "Mara",
    "Tom",
    "Lina",
    "Carlos",
    "Aisha",
    "Jonas",
    "Priya",
    "Emil",
    "Sofia",
    "Daniel",
    "Nora",
    "Kofi",
    "Elena",
    "Victor",
    "Hana",
    "Peter",
)
CITIES = (
    "Lisbon",
    "Bergen",
    "Toronto",
    "Nairobi",
    "Graz",
    "Porto",
    "Dublin",
    "Leeds",
    "Boston",
    "Ghent",
    "Perth",
    "Lyon",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = ("January", "March", "April", "May", "June", "September", "October", "November")

OPENINGS = (
    "",
    "",
    "",
    "",
    "",
    "Hi! ",
    "Hello! ",
    "Quick question: ",
    "Please help me. ",
    "One more thing: ",
    "Good morning. ",
    "I am curious. ",
)
LENGTHS = (
    "",
    "",
    "",
    " Answer in two or three sentences.",
    " Keep it short.",
    " One paragraph is enough.",
    " Use simple words.",
    " Please give an example.",
    " Be precise, but friendly.",
    " I have about a minute to read.",
    " Write no more than five sentences.",
)
SYSTEMS = (
    "You answer briefly.",
    "You are a patient teacher who explains things step by step.",
    "You are a friendly assistant in a public office. Be polite and clear.",
    "You write plain English for readers who are still learning the language.",
    "You are a careful editor. You never add facts.",
)

# {f1} {f2} {f3}: the topic's facts in random order; {p} {q}: two people; {n} < {m}: numbers;
# {k}: a small number; {a} {b}: the pair; {o}: opening; {l}: wish for a length
PHRASINGS = {
    "chat": (
        (
            "{o}I have been {activity} lately and I really enjoy it. What do you think about "
            "{name}?{l}"
        ),
        (
            "{o}My friend {p} never stops talking about {name}. How can I join the conversation "
            "without sounding silly?{l}"
        ),
        (
            "I'm a bit tired today, but {activity} always cheers me up. Do you have a nice thought "
            "about {name} for me?"
        ),
        (
            "{o}Guess what: tomorrow I will be {activity}! I am excited and a little nervous. Any "
            "words for me?"
        ),
        "{o}What is the most surprising thing about {name}, in your opinion?{l}",
        (
            "{p} and I had a small argument about {name}. {p} says the subject is boring. Convince "
            "us that it is not."
        ),
        "{o}Tell me something about {name} that I can mention at dinner tonight.{l}",
        (
            "Last weekend I spent {k} hours {activity}, and now my family thinks I am strange. Is "
            "that normal?"
        ),
        (
            "{o}I used to dislike everything that had to do with {name}, but lately I have changed "
            "my mind. Why might that happen to people?"
        ),
        "{o}If you could ask an expert one question about {name}, what would it be and why?",
    ),
    "explanation": (
        "{o}Explain {name} to a ten-year-old child.{l}",
        (
            "What should a beginner know about {name}? Start with the most important idea and then "
            "say why it matters."
        ),
        '{o}I read this sentence about {name}: "{f1}" Can you explain why that is so?{l}',
        "{o}Why are people so interested in {name}?{l}",
        (
            "Someone told me the following about {name}: {f2} Is it true, and what is the reason "
            "behind it?"
        ),
        (
            "{o}What is a common mistake in the way people think about {name}? Explain it and put "
            "it right."
        ),
        (
            "Explain the difference between knowing a few facts about {name} and really "
            "understanding the subject. Use an example."
        ),
        (
            "{o}How would you explain {name} with an everyday comparison, for example from the "
            "kitchen?"
        ),
        (
            "In class we learned this about {name}: {f1} {f3} Please explain how the two "
            "statements belong together."
        ),
        "{o}What has changed about {name} during the last hundred years?{l}",
    ),
    "code": (
        (
            "Write a Python function `largest(items)` that takes a list of {items}, each a "
            'dictionary with the keys "name" and "{measure}", and returns the name of the one with '
            "the largest {measure}."
        ),
        (
            "Write a Python function that reads a CSV file of {items} with the columns name and "
            "{measure} and prints the average {measure}. Explain the code in two sentences."
        ),
        (
            "{o}I have a table of {items} with the columns name, {measure} and year. Write an SQL "
            "query for the {k} rows with the highest {measure} since the year 2000."
        ),
        (
            "Write a small Python class for {items} with a name, a {measure} and a method that "
            "compares two of them by {measure}."
        ),
        (
            'What does this Python line do, and what is it called? `names = [x["name"] for x in '
            'rows if x["{measure}"] > {n}]` The rows describe {items}.'
        ),
        (
            "This function should add up the {measure} of all {items}, but it returns only the "
            "first one. What is wrong?\n\ndef total(rows):\n    s = 0\n    for row in rows:\n      "
            '  s += row["{measure}"]\n        return s'
        ),
        (
            "Write a Python function that groups a list of {items} by the first letter of their "
            "name and returns a dictionary. Add a short docstring."
        ),
        (
            "Write a JavaScript function that takes an array of {items} and returns a new array "
            "sorted by {measure}, without changing the original."
        ),
        (
            "Show me how to write a unit check in Python with assert for a function "
            "`mean_{measure}(rows)` that computes the mean {measure} of some {items}."
        ),
        (
            "{o}Write a short Python program that asks the user for the {measure} of {k} {items} "
            "and prints the smallest value."
        ),
    ),
    "maths": (
        (
            "A book about {name} has {m} pages. {p} reads {n} pages a day. After how many days is "
            "the book finished? Show your steps."
        ),
        (
            "{p} gives a course on {name} for {n} people. Each pays {m} euros, and the room costs "
            "{n} euros. How much money is left? Explain the calculation."
        ),
        (
            "In a survey {m} people were asked about {name}, and {n} of them said that they like "
            "the subject. What percentage is that, roughly?"
        ),
        (
            "{p} collects pictures of {items}. There are {n} in the first album and {k} times as "
            "many in the second. How many pictures are there together?"
        ),
        (
            "The {measure} of three {items} was noted as {n}, {m} and {k}. What is the mean of "
            "these three numbers? Show how you get it."
        ),
        (
            "Tickets for a talk about {name} cost {k} euros for children and twice as much for "
            "adults. What do {n} children and {k} adults pay in total?"
        ),
        (
            "{p} spends {k} hours a week on {activity}. How many hours is that in {n} weeks, and "
            "how many days of 24 hours?"
        ),
        (
            "{o}A poster shows {n} {items} in {k} equal rows, with a few left over. How many are "
            "in each row, and how many are left over?"
        ),
        (
            "{p} and {q} share {m} stickers of {items} in the ratio 2 to 3. How many stickers does "
            "each of them get? Explain step by step."
        ),
        (
            "A shop sells a calendar about {name} for {m} euros. In {month} the price falls by 20 "
            "percent. What is the new price?"
        ),
    ),
    "lists": (
        "{o}Give me three short tips for {activity}, with one sentence of reason for each.",
        (
            "Name three questions that one should ask before {activity}, and say briefly why each "
            "of them matters."
        ),
        (
            "{o}List four words that everybody should know in connection with {name}, each with a "
            "short definition."
        ),
        "What are three common myths about {name}? Correct each of them in one sentence.",
        (
            "{o}Write a short packing list for somebody who is {activity}. Five things are enough; "
            "explain the most important one."
        ),
        "Give two advantages and two disadvantages of {activity}.",
        (
            "{o}Suggest three titles for a school project about {name}, and say which of them you "
            "like best."
        ),
        "List the steps that a beginner should take when {activity}. Use at most five steps.",
        "{o}Which three facts about {name} would fit on a small poster?",
        "Name three jobs that have to do with {name} and describe each in one sentence.",
    ),
    "rewriting": (
        'Rewrite this sentence about {name} so that a child understands it: "{f1}"',
        (
            "Make the following text more formal: \"Hey {p}, I'm {activity} on {day}, wanna come "
            "along? It'll be fun!\""
        ),
        (
            '{o}Rewrite this in a friendlier tone: "{q}, you forgot to send me the notes about '
            '{name}. I need them by {day}."'
        ),
        (
            'Correct the spelling and grammar: "{p} dont know much about {name}, but she want to '
            'lern it untill {month}."'
        ),
        'Put these two sentences about {name} together into one: "{f1}" "{f2}"',
        'Shorten this text about {name} to one sentence: "{f1} {f2} {f3}"',
        '{o}Rewrite the following sentence about {name} as a question and then answer it: "{f3}"',
        (
            "Turn these notes into a polite e-mail: meeting about {name}, {day} at {k} o'clock, "
            "bring a pen, ask {p} about the room."
        ),
        (
            "Rewrite this remark on {name} as a headline for a newspaper, and then as a first "
            'sentence of an article: "{f2}"'
        ),
        (
            'Say the following about {name} in other words, without losing any information: "{f1} '
            '{f3}"'
        ),
    ),
    "extraction": (
        (
            'Extract the name, the city, the day and the price from this text as JSON: "{p} from '
            "{city} gives a talk about {name} on {day}. It starts at {k} o'clock, and a ticket "
            'costs {n} euros."'
        ),
        (
            'Who does what, and by when? Answer in one line for each person. "{p} will prepare the '
            'slides about {name} until {day}. {q} books the room in {city} and buys {k} markers."'
        ),
        (
            'Which numbers appear in the following text, and what does each of them mean? "Our '
            "club for {name} was founded in {year}. It has {m} members, and {n} of them live in "
            '{city}."'
        ),
        (
            '{o}Find the date, the place and the topic in this message: "Dear {p}, we would like '
            "to invite you to {city} on {k} {month}. We will speak about {name} and have lunch "
            'together. Yours, {q}"'
        ),
        'Read the text about {name} and write down only its main claim: "{f1} {f2} {f3}"',
        'List the important nouns of this sentence about {name} and explain one of them: "{f2}"',
        (
            'Is this review positive or negative, and which words show it? "The evening about '
            "{name} in {city} was well organised, but the speaker, {p}, was hard to understand, "
            'and {n} euros are too much."'
        ),
        (
            'Make a table with the columns person and order from this text: "{p} would like {k} '
            'books about {name}, {q} takes one, and the library in {city} wants {n}."'
        ),
        (
            'From this note, extract the telephone number and the reason for the call: "{q} called '
            'on {day} because of the course on {name}; please call back, number 0{m}-{n}{k}41."'
        ),
        (
            'What is the text about, which year is mentioned, and who is responsible? "Since '
            '{year} {p} has been looking after the exhibition on {name} in {city}."'
        ),
    ),
    "summarising": (
        'Summarise this text about {name} in one sentence: "{f1} {f2} {f3}"',
        (
            '{o}Give me the main point of the following paragraph about {name}. "{f2} {f1} That is '
            'what {p} told us on {day}, and most of us were surprised."'
        ),
        (
            'Summarise this message for somebody who has no time: "Hi {q}, I have been {activity}. '
            "It took {k} hours instead of two, it rained, and I lost my keys, but I would do it "
            'again at once. Will you come along in {month}? Love, {p}"'
        ),
        (
            'Write a summary of this text on {name}, at most 25 words: "{f3} {f1} {f2} Few people '
            'in our town knew this before the exhibition in {month}."'
        ),
        (
            'What are the two most important ideas in this text? "{f1} {f3} For these reasons {p} '
            'wrote a small book about {name}."'
        ),
        (
            "Summarise the minutes: \"{day}, {k} o'clock. {p} reports on {name}. {q} asks about "
            'the costs: {m} euros. The group agrees to meet again in {month}."'
        ),
        '{o}Write a title and one sentence that sum up this note on {name}: "{f2} {f3}"',
        (
            "Explain in your own words what this paragraph about {name} says, as if you told it to "
            'a friend: "{f1} {f2} {f3}"'
        ),
    ),
    "advice": (
        (
            "{o}I am thinking about {activity}, but I have only {n} euros and one free weekend. "
            "How should I begin?{l}"
        ),
        (
            "{p} wants to start {activity} in {month} and has never done anything like it. Make a "
            "simple plan for the first two weeks."
        ),
        "{o}What should I avoid when {activity}?{l}",
        (
            "I promised my class in {city} an afternoon about {name}. We have {k} hours. How could "
            "the afternoon look?"
        ),
        (
            "{o}I started {activity} a month ago, and I already feel like giving up. What would "
            "you advise?"
        ),
        "Is {activity} a good idea for somebody who is seventy years old? Give honest advice.",
        "{o}How can I find out more about {name} without spending money?{l}",
        (
            "My brother {p} is {activity}, and I want to give him a present for about {n} euros. "
            "What would be useful?"
        ),
        (
            "Help me decide: on {day} I could either stay at home or spend the day {activity}. "
            "What speaks for each?"
        ),
    ),
    "creative": (
        "Write a short poem of four lines about {name}.",
        (
            "Write the first paragraph of a story in which {p} is {activity} and something "
            "unexpected happens."
        ),
        (
            "{o}Invent a slogan for an exhibition about {name} in {city}, and explain it in one "
            "sentence."
        ),
        "Write a short dialogue between {p} and {q}, who disagree about {name}.",
        (
            "Describe a morning in {city} from the point of view of somebody who is {activity}. "
            "One paragraph."
        ),
        "Write a diary entry of somebody who spent the whole {day} {activity}.",
        "{o}Write a funny but friendly birthday card for {p}, who loves {name}.",
        'Invent a short legend about {name} that explains this: "{f1}"',
        "Write a postcard from {city} in which {q} tells a friend about {activity}.",
        (
            "Write a short scene for a play: two strangers wait for a bus in {month} and begin to "
            "talk about {name}."
        ),
    ),
    "comparison": (
        "{o}What is the difference between {a} and {b}?{l}",
        "Compare {a} and {b}: what do they have in common, and where do they differ?",
        "{p} prefers {a}, and {q} prefers {b}. Give one good argument for each of them.",
        "{o}I cannot decide between {a} and {b}. What would you look at first?{l}",
        "When would you choose {a}, and when {b}? The subject is {name}, and I am a beginner.",
        "{o}Are {a} and {b} really so different? Explain it with one example.",
        (
            "In a talk about {name} somebody mentioned {a} and {b}. Explain both in a sentence "
            "each, and then name the most important difference."
        ),
        "Which is harder to explain to a child, {a} or {b}? Give your reasons.",
    ),
    "reading": (
        (
            'Text: "{f1} {f2} {f3}" Question: what does the text say about {name}? Answer with one '
            "full sentence and do not add anything."
        ),
        (
            "Read this and answer: does the text support the claim that everything about {name} "
            'has been known for a long time? "{f1} {f2}"'
        ),
        (
            '"{p} and {q} are {activity}. {p} brought {k} sandwiches, and {q} forgot the water." '
            "Who forgot something, and what should they do now?"
        ),
        (
            'Here is a passage about {name}: "{f3} {f1}" Which question does the first sentence '
            "answer? Write that question."
        ),
        (
            'A leaflet about {name} says: "{f2}" Why could this be important for somebody who is '
            "{activity}?"
        ),
        (
            'Notice: "The course on {name} in {city} moves from {day} to the next day. It still '
            "begins at {k} o'clock. Bring {n} euros for material.\" Question: what has changed, "
            "and what stays the same?"
        ),
        (
            'According to the following text, what is special about {name}? "{f1} {f3}" Answer in '
            "one or two sentences."
        ),
        (
            'Passage about {name}: "{f2} {f3}" Write one question that can be answered from the '
            "passage and one that cannot, and say why."
        ),
        (
            '"In {year} {p} opened a small museum of {name} in {city}. In its first month {m} '
            'people came, {n} of them children." How many visitors were adults, and when did it '
            "open?"
        ),
    ),
}
# A dialogue is a list of user turns; the answers between them are the target's own
DIALOGUES = (
    (
        "{o}What do I need for {activity}?",
        "And what would that cost, roughly?",
        "Thank you. What is the first step?",
    ),
    (
        "{o}Can you tell me something about {name}?",
        "That is interesting. Why is it so?",
        "How could I explain this to my little brother?",
    ),
    ("I have heard this about {name}: {f1} Is it true?", "Where could I read more about it?"),
    (
        "Hi, I'm {p} from {city}.",
        "I am {activity} at the moment. Do you have a tip for me?",
        "What was my name again, and what am I doing?",
    ),
    (
        "{o}What is the difference between {a} and {b}?",
        "Which of the two would you recommend to a beginner?",
        "Sum up your advice in one sentence.",
    ),
    (
        "Write one sentence about {name}.",
        "Make it a little longer.",
        "Now make it sound more cheerful.",
    ),
    (
        "My class has to give a talk about {name}. How should we begin?",
        "We have only {k} minutes. What can we leave out?",
        "Suggest a good last sentence.",
    ),
    (
        "{o}Ask me one question about {name}.",
        "I am not sure. Can you give me a hint?",
        "Please tell me the answer.",
    ),
    ('{p} says about {name}: "{f2}" What does that mean?', "Can you say it in simpler words?"),
    (
        "I would like to write to {q} about {name}. Suggest a first sentence.",
        "That is too formal. Try again, please.",
        "Good. Now add a friendly closing line.",
    ),
)
